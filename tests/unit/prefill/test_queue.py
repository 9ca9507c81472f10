"""The order of the prefill queue."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh.queue_order import AGING, ORDERS
from services.prefill.queue import FLOOR_EVERY, PrefillQueue
from services.prefill.slot import PrefillSlot, PrefillSubmission


def slot(
    name: str,
    *,
    priority_class: int = 4,
    tenant: str = "",
    weight: float = 1.0,
    priority: int = 0,
    resumed: bool = False,
    shadow: bool = False,
    tokens: int = 8,
    expected_s: float = 0.0,
    at_s: float = 0.0,
) -> PrefillSlot:
    """Return a queued slot."""
    submitted = PrefillSubmission(
        request_id=name,
        attempt=1,
        start_position=0,
        prompt_tokens=tokens,
        blocks=1,
        priority=priority,
        is_shadow=shadow,
        is_resumed=resumed,
        estimate_s=0.0,
        expected_s=expected_s,
        deadline_s=1e9,
        submitted_s=at_s,
        traceparent="",
        priority_class=priority_class,
        tenant=tenant,
        weight=weight,
    )
    return PrefillSlot(submitted, submit=None)


def served(queue: PrefillQueue, count: int = 1 << 30) -> list[PrefillSlot]:
    """Pass up to `count` slots to the engine, and return them in order."""
    taken: list[PrefillSlot] = []
    while len(taken) < count and (head := queue.head()) is not None:
        taken.append(head)
        queue.take(head)
    return taken


def test_classes_precede_resumed_then_priority_then_arrival() -> None:
    """Higher classes come first, resumed requests at the head of their class, and shadow traffic last in any class."""
    queue = PrefillQueue(16)
    for one in (
        slot("late", priority=-5),
        slot("shadow", priority=100, priority_class=7, shadow=True),
        slot("a"),
        slot("b"),
        slot("resumed", resumed=True, priority=-100),
        slot("resumed, later", resumed=True, priority=100, at_s=1.0),
        slot("high", priority=5),
        slot("lower band", priority_class=3, priority=100),
        slot("higher band", priority_class=5, priority=-100),
    ):
        queue.push(one)
    assert [one.submitted.request_id for one in served(queue)] == [
        "higher band",
        "resumed",
        "resumed, later",
        "high",
        "a",
        "b",
        "late",
        "lower band",
        "shadow",
    ]


def test_the_shortest_prompt_of_a_tenant_goes_first_until_others_have_aged() -> None:
    """A second of waiting counts AGING seconds of prefill. Resumed requests have the same order among themselves."""
    queue = PrefillQueue(16)
    for one in (
        slot("long", expected_s=2.0),
        slot("short", expected_s=0.5),
        slot("short, later", expected_s=0.5, at_s=4.9),
        slot("short, too late", expected_s=0.5, at_s=5.1),
        slot("resumed, long", expected_s=2.0, resumed=True),
        slot("resumed, short", expected_s=0.5, at_s=4.9, resumed=True),
        slot("resumed, too late", expected_s=0.5, at_s=5.1, resumed=True),
    ):
        queue.push(one)
    order = [one.submitted.request_id for one in served(queue)]
    assert order[:3] == ["resumed, short", "resumed, long", "resumed, too late"]
    assert order[3:] == ["short", "short, later", "long", "short, too late"]


def test_tenants_share_fairly_with_prompts_of_any_length() -> None:
    """The tenant with less service goes first, even with longer prompts. At equal service the shortest prompt goes."""
    queue = PrefillQueue(16)
    for number in range(3):
        queue.push(slot(f"short {number}", tenant="a", tokens=100, expected_s=0.1 * number))
        queue.push(slot(f"long {number}", tenant="b", tokens=100, expected_s=9.0 - number))
    assert [one.submitted.request_id for one in served(queue)] == [
        *("short 0", "long 2", "short 1", "long 1", "short 2", "long 0"),
    ]


def test_a_burst_of_one_tenant_does_not_delay_another_tenant() -> None:
    """Ten long prompts wait when short ones of another tenant come. These wait for one long prompt at most."""
    queue = PrefillQueue(64)
    for number in range(10):
        queue.push(slot(f"a{number}", tenant="a", tokens=1000))
    served(queue, 1)
    for number in range(5):
        queue.push(slot(f"b{number}", tenant="b", tokens=10))
    order = [one.submitted.request_id for one in served(queue, 6)]
    assert set(order[:6]) == {f"b{number}" for number in range(5)} | {"a1"}, order
    assert order.index("b0") <= 1, order


def test_an_idle_tenant_saves_no_share_up() -> None:
    """A tenant that was idle while another was served gets its half from now on, and no more."""
    queue = PrefillQueue(64)
    for number in range(40):
        queue.push(slot(f"a{number}", tenant="a"))
    served(queue, 10)
    for number in range(10):
        queue.push(slot(f"b{number}", tenant="b"))
    assert Counter(one.submitted.tenant for one in served(queue, 10)) == {"a": 5, "b": 5}


def test_full_queue_refuses() -> None:
    """The limit holds, and a slot is free again when a prompt leaves."""
    queue = PrefillQueue(2)
    first = slot("a")
    queue.push(first)
    queue.push(slot("b"))
    assert queue.is_full()
    with pytest.raises(ValueError, match="2/2"):
        queue.push(slot("c"))
    queue.remove(first)
    queue.remove(first)
    assert not queue.is_full() and queue.tokens == 8


class Twin:
    """The same order from a list, by the present waiting times."""

    def __init__(self, order: str = "shortest") -> None:
        self.is_fifo = order == "fifo"
        self.waiting: list[tuple[int, PrefillSlot]] = []
        self.had: dict[tuple[int, str], float] = {}
        self.floor: dict[int, float] = {}
        self.started: dict[int, int] = {}
        """By class: starts since its last one, or since it began to wait."""
        self.taken = 0

    def in_band(self, one: PrefillSlot) -> list[PrefillSlot]:
        key = (one.submitted.is_shadow, one.submitted.priority_class)
        return [
            other
            for _, other in self.waiting
            if (other.submitted.is_shadow, other.submitted.priority_class) == key
        ]

    def turns(self, one: PrefillSlot) -> list[PrefillSlot]:
        """Prompts of the tenants that share with that of `one`."""
        return [other for other in self.in_band(one) if not other.submitted.is_resumed]

    def push(self, one: PrefillSlot, arrival: int) -> None:
        priority_class = self.key(one)
        if not self.in_band(one):  # a new busy period
            self.floor[priority_class], self.started[priority_class] = 0.0, self.taken
            self.had = {key: had for key, had in self.had.items() if key[0] != priority_class}
        if not one.submitted.is_resumed and not any(
            other.submitted.tenant == one.submitted.tenant for other in self.turns(one)
        ):
            had = self.had.get((priority_class, one.submitted.tenant), 0.0)
            self.had[priority_class, one.submitted.tenant] = max(had, self.floor[priority_class])
        self.waiting.append((arrival, one))

    def head(self, now_s: float) -> PrefillSlot | None:
        if not self.waiting:
            return None
        users = [entry for entry in self.waiting if not entry[1].submitted.is_shadow] or self.waiting
        if self.taken % FLOOR_EVERY == FLOOR_EVERY - 1:
            longest = min((self.started[self.key(one)], -self.key(one)) for _, one in users)
            users = [entry for entry in users if -self.key(entry[1]) == longest[1]]
        return min(users, key=lambda entry: self.rank(entry, now_s))[1]

    def length(self, one: PrefillSlot, now_s: float) -> float:
        """The length of a prompt minus its aging."""
        waited_s = now_s - one.submitted.submitted_s
        return -waited_s if self.is_fifo else one.submitted.expected_s - AGING * waited_s

    def rank(self, entry: tuple[int, PrefillSlot], now_s: float) -> tuple[float, ...]:
        arrival, one = entry
        before = (one.submitted.is_shadow, -one.submitted.priority_class, not one.submitted.is_resumed)
        if one.submitted.is_resumed:
            return (*before, self.length(one, now_s), arrival)
        first = min(
            (-other.submitted.priority, self.length(other, now_s), came)
            for came, other in self.waiting
            if other.submitted.tenant == one.submitted.tenant
            and self.key(other) == self.key(one)
            and not other.submitted.is_resumed
        )
        own = (-one.submitted.priority, self.length(one, now_s), arrival)
        return (*before, self.had[self.key(one), one.submitted.tenant], *first[1:], *own)

    def take(self, one: PrefillSlot) -> None:
        self.taken += 1
        priority_class = self.key(one)
        self.started[priority_class] = self.taken
        if not one.submitted.is_resumed:
            least = min(self.had[priority_class, other.submitted.tenant] for other in self.turns(one))
            self.floor[priority_class] = max(self.floor[priority_class], least)
            self.had[priority_class, one.submitted.tenant] += (
                one.submitted.prompt_tokens / one.submitted.weight
            )
        self.remove(one)

    def remove(self, one: PrefillSlot) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] is not one]

    @staticmethod
    def key(one: PrefillSlot) -> int:
        return one.submitted.priority_class - 100 * one.submitted.is_shadow


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("seed", range(8))
def test_queue_agrees_with_a_list(seed: int, order: str) -> None:
    """Under random pushes, starts and removals the head equals that of the list, and no removed prompt keeps memory."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    queue, twin = PrefillQueue(16, ORDERS[order]), Twin(order)
    weights = {str(number): rng.choice((0.5, 1.0, 3.0)) for number in range(200)}
    now_s, pushed, left = 1000 * rng.random(), 0, 0
    for arrival in range(800):
        now_s += rng.choice((0.0, 0.0, rng.random(), 10 * rng.random()))
        if rng.random() < 0.5 and not queue.is_full():
            tenant = str(rng.randrange(rng.choice((1, 3, 200))))
            one = slot(
                str(arrival),
                priority_class=rng.randrange(3),
                tenant=tenant,
                weight=weights[tenant],
                priority=rng.choice((0, 0, 0, 1, 2)),
                resumed=rng.random() < 0.2,
                shadow=rng.random() < 0.1,
                tokens=rng.randrange(1, 500),
                expected_s=rng.choice((0.0, 0.5, 2.0, rng.random(), 10 * rng.random())),
                at_s=now_s,
            )
            queue.push(one)
            twin.push(one, arrival)
            pushed += 1
        elif twin.waiting and rng.random() < 0.3:
            one = rng.choice(twin.waiting)[1]
            twin.remove(one)
            queue.remove(one)
            left += 1
        elif (head := twin.head(now_s)) is not None:
            twin.take(head)
            queue.take(head)
            left += 1
        assert queue.head() is twin.head(now_s)
        assert len(queue) == len(twin.waiting) == pushed - left
        assert queue.tokens == sum(one.submitted.prompt_tokens for _, one in twin.waiting)
    lines = [
        line
        for priority_class in queue._priority_classes.values()
        for line in (priority_class._resumed, *priority_class._lines.values())
    ]
    assert sum(len(line._heap) for line in lines) <= 64 * max(1, len(lines)) + 4 * 17
    assert sum(len(priority_class._lines) for priority_class in queue._priority_classes.values()) <= len(
        queue
    )


@pytest.mark.parametrize("seed", range(10))
def test_no_class_starves_except_shadow_traffic(seed: int) -> None:
    """Under any load of higher classes, each of k waiting classes starts a prompt within k times FLOOR_EVERY."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    queue = PrefillQueue(30)
    waits, since = Counter[int](), dict[int, int]()
    lowest = 0
    for started in range(4000):
        while not queue.is_full():
            is_low = rng.random() < 0.02
            one = slot(
                "",
                priority_class=rng.randrange(3) if is_low else rng.randrange(5, 8),
                tenant=str(rng.randrange(5)),
                tokens=rng.randrange(1, 1000),
                priority=rng.randrange(5),
                resumed=rng.random() < 0.3,
                shadow=rng.random() < 0.02,
            )
            queue.push(one)
            if not one.submitted.is_shadow:
                waits[one.submitted.priority_class] += 1
                since.setdefault(one.submitted.priority_class, started)
        (head,) = served(queue, 1)
        if not head.submitted.is_shadow:
            lowest += head.submitted.priority_class < 3
            waits[head.submitted.priority_class] -= 1
            since[head.submitted.priority_class] = started + 1
            if not waits[head.submitted.priority_class]:
                del since[head.submitted.priority_class]
        late = [priority_class for priority_class, at in since.items() if started + 1 - at >= FLOOR_EVERY * 6]
        assert not late, (late, started)
    assert lowest > 50, "lower classes must occur"


@pytest.mark.parametrize("seed", range(10))
def test_waiting_tenants_have_had_their_shares(seed: int) -> None:
    """While two tenants wait, their tokens over weights differ by one prompt at most."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    queue = PrefillQueue(64)
    weights = {"a": 1.0, "b": rng.choice((0.25, 2.0))}
    longest = {"a": rng.choice((50, 4000)), "b": rng.choice((50, 4000))}
    had, waits = dict.fromkeys(weights, 0.0), Counter[str]()
    for arrival in range(2000):
        for tenant, weight in weights.items():
            while waits[tenant] < 16:
                tokens = rng.randrange(1, longest[tenant])
                queue.push(slot(str(arrival), tenant=tenant, weight=weight, tokens=tokens))
                waits[tenant] += 1
        (head,) = served(queue, 1)
        waits[head.submitted.tenant] -= 1
        had[head.submitted.tenant] += head.submitted.prompt_tokens / head.submitted.weight
        prompt = max(longest[tenant] / weights[tenant] for tenant in weights)
        assert abs(had["a"] - had["b"]) <= prompt, (had, prompt)


def test_the_longest_wait_is_that_of_a_user() -> None:
    """Shadow traffic and what was taken do not wait."""
    queue = PrefillQueue(9)
    first, second = slot("first", at_s=1.0), slot("second", at_s=2.0)
    for each in (slot("copy", shadow=True), second, first):
        queue.push(each)
    assert queue.longest_wait_s(5.0) == 4.0
    queue.take(first)
    assert queue.longest_wait_s(5.0) == 3.0
    queue.remove(second)
    assert queue.longest_wait_s(9.0) == 0.0 and len(queue) == 1
