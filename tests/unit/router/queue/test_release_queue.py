"""The release queue: its order against a plain list, fairness, the floor of lower classes, and victims of a full queue."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import InitVar, dataclass, field
from itertools import pairwise

import pytest

from kvmesh.queue_order import shortest
from services.router.queue import fairness, tenant_queues
from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT, Ticket
from services.router.queue.release_queue import FLOOR_EVERY, LOOK_AHEAD, ReleaseQueue
from tests.unit.overtaking import overtaken_s


@dataclass(eq=False)
class Item:
    name: int = 0
    priority: int = 0
    is_resumed: bool = False
    tenant: str = ""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    weight: float = 0.0
    is_sheddable: bool = False
    token_count: int = 1
    output_tokens_max: int = 1
    order: InitVar[float] = 0.0
    work: InitVar[int] = 0
    ticket: Ticket = field(init=False)

    def __post_init__(self, order: float, work: int) -> None:
        self.ticket = Ticket(work or self.token_count, order)

    @property
    def submitted(self) -> Item:
        return self


Queue = ReleaseQueue[Item]
Lane = tuple[int, bool, int]


def lane_of(item: Item) -> Lane:
    priority = 0 if item.is_resumed else max(-100, min(100, item.priority))
    return (-item.priority_class, not item.is_resumed, -priority)


def release_next(queue: Queue) -> Item:
    item = next(queue.heads())
    queue.release(item, item.token_count)
    return item


def test_one_tenant_is_served_by_class_then_resumed_then_priority_then_length_then_arrival() -> None:
    """Under random adds, returns to the head and removals, the order is that of a plain list per queue.

    Resumed requests go by length alone: a client's priority does not put them before those of other tenants. Requeued
    requests go first.
    """
    for seed in range(20):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(1000)
        twin: dict[Lane, list[Item]] = {}
        outside: list[Item] = []
        returned: set[Item] = set()
        for name in range(300):
            kind = rng.random()
            if kind < 0.5:
                priority = rng.choice((-500, -1, 0, 0, 0, 7, 100, 400))
                item = Item(name, priority, rng.random() < 0.3, priority_class=rng.choice((0, 4, 4, 7)))
                item.ticket.order = rng.choice((0.0, 1.0, rng.random(), 0.001 * name))
                queue.add(item)
                twin.setdefault(lane_of(item), []).append(item)
                # Equal requests go by arrival; a requeued one goes before all of its queue.
                twin[lane_of(item)].sort(key=lambda one: -1.0 if one in returned else one.ticket.order)
            elif kind < 0.6 and outside:
                item = outside.pop(rng.randrange(len(outside)))
                queue.add(item, at_head=True)
                returned.add(item)
                twin.setdefault(lane_of(item), []).insert(0, item)
            elif any(twin.values()):
                lane = rng.choice([lane for lane, items in twin.items() if items])
                item = rng.choice(twin[lane]) if rng.random() < 0.5 else twin[lane][0]
                twin[lane].remove(item)
                assert queue.remove(item)
                assert not queue.remove(item)
                outside.append(item)
            expected = [item for lane in sorted(twin) for item in twin[lane]]
            assert list(queue) == expected, f"{seed=}"
            highest = [item for item in expected if item.priority_class == expected[0].priority_class]
            assert list(queue.heads()) == highest[:LOOK_AHEAD], f"{seed=}"
            assert len(queue) == len(expected)
            queue.assert_consistent()


def test_the_least_served_tenant_is_first_whatever_happens() -> None:
    """Random tenants, corrections, refunds and removals: the heaps with lazy entries choose as a full scan would."""
    for seed in range(15):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(10_000)
        waiting: list[Item] = []
        running: list[Item] = []
        for name in range(500):
            kind = rng.random()
            if kind < 0.45:
                item = Item(
                    name,
                    tenant=f"t{rng.randrange(8)}",
                    weight=rng.choice((0.0, 1.0, 4.0)),
                    is_sheddable=rng.random() < 0.3,
                    is_resumed=rng.random() < 0.02,
                    token_count=rng.randrange(1, 1000),
                    output_tokens_max=rng.randrange(1, 500),
                )
                queue.add(item)
                waiting.append(item)
            elif kind < 0.75 and waiting:
                lowest = min(
                    item.ticket.counters.served for item in waiting if item.ticket.counters is not None
                )
                item = release_next(queue)
                assert item.is_resumed or item.ticket.charged_prefill == item.token_count
                waiting.remove(item)
                running.append(item)
                fresh = [one for one in waiting if one.is_resumed]
                assert item.is_resumed or not fresh, f"{seed=}"
                if not item.is_resumed:
                    assert item.ticket.counters is not None
                    charge = (
                        max(item.ticket.charged_prefill, 2 * item.ticket.charged_output)
                        / item.ticket.counters.weight
                    )
                    assert item.ticket.counters.served <= lowest + charge + 1e-6, f"{seed=}"
            elif kind < 0.85 and running:
                item = running.pop(rng.randrange(len(running)))
                queue.settle_prefill(item, rng.randrange(item.token_count + 1))
                queue.settle_output(item, rng.randrange(item.output_tokens_max + 1))
            elif kind < 0.9 and running:
                item = running.pop(rng.randrange(len(running)))
                queue.add(item, at_head=True)
                waiting.append(item)
            elif waiting:
                item = waiting.pop(rng.randrange(len(waiting)))
                queue.remove(item)
            queue.assert_consistent()
            assert bool(list(queue.heads())) == bool(waiting), "work waits and no tenant may release"


@pytest.mark.parametrize("dominant", ["prompts", "outputs", "each its own"])
def test_two_tenants_that_always_wait_are_served_equally_by_weight(dominant: str) -> None:
    """The charges of two tenants differ by no more than one request of each, for any requests; weights hold."""
    for seed in range(8):
        rng = random.Random(seed)
        weights = {"a": 1.0, "b": rng.choice((1.0, 3.0))}
        long = {"a": 8 if dominant == "each its own" else 4000, "b": 4000}
        outputs = {"a": 2000, "b": 8} if dominant == "each its own" else {"a": 1, "b": 1}
        if dominant == "outputs":
            long, outputs = {"a": 8, "b": 8}, {"a": 2000, "b": 30}
        queue: Queue = ReleaseQueue(10_000)
        served: Counter[str] = Counter()
        largest: Counter[str] = Counter()

        def request(tenant: str, draw: random.Random, most: int, made: int, weight: float) -> Item:
            tokens = draw.randrange(1, most + 1)
            return Item(tenant=tenant, weight=weight, token_count=tokens, output_tokens_max=made)

        for tenant, weight in weights.items():
            for _ in range(3):
                queue.add(request(tenant, rng, long[tenant], outputs[tenant], weight))
        for _ in range(2000):
            item = release_next(queue)
            made = rng.randrange(1, item.output_tokens_max + 1)
            queue.settle_prefill(item, item.token_count)
            queue.settle_output(item, made)
            cost = {"prompts": item.token_count, "outputs": 2 * made, "each its own": 0}[dominant]
            if dominant == "each its own":
                cost = item.token_count if item.tenant == "b" else 2 * made
            served[item.tenant] += cost
            largest[item.tenant] = max(largest[item.tenant], cost)
            tenant = item.tenant
            queue.add(request(tenant, rng, long[tenant], outputs[tenant], weights[tenant]))
            gap = abs(served["a"] / weights["a"] - served["b"] / weights["b"])
            slack = (
                2 * fairness.OUTPUT_START * fairness.DECODE_WEIGHT
            )  # first requests are charged as expected
            bound = largest["a"] / weights["a"] + largest["b"] / weights["b"]
            assert gap <= bound + slack, f"{seed=}: {served}"


def test_a_returning_tenant_is_next_and_starves_no_other() -> None:
    """A tenant that was idle has no claim to unused capacity, and waits for one request at most."""
    queue: Queue = ReleaseQueue(10_000)
    queue.add(Item(tenant="back", token_count=100))
    release_next(queue)
    for _ in range(400):
        queue.add(Item(tenant="busy", token_count=100))
    for _ in range(200):
        release_next(queue)
    for _ in range(100):
        queue.add(Item(tenant="back", token_count=100))
    order = [release_next(queue).tenant for _ in range(100)]
    assert order[0] == "back"
    assert all(one != other for one, other in pairwise(order[1:])), "they alternate"


def test_a_resumed_request_does_not_advance_virtual_time() -> None:
    """A resumed request goes first even if its tenant had far more service. A returning and a waiting tenant still
    alternate."""
    queue: Queue = ReleaseQueue(10_000)
    queue.add(Item(tenant="served", output_tokens_max=100_000))
    queue.settle_output(release_next(queue), 100_000)
    for _ in range(100):
        queue.add(Item(tenant="waits", token_count=100))
    queue.add(Item(tenant="served", is_resumed=True))
    assert release_next(queue).is_resumed
    order = []
    for _ in range(30):
        if not queue.waiting_tokens("comes", PRIORITY_CLASS_DEFAULT):
            queue.add(Item(tenant="comes", token_count=100))
        order.append(release_next(queue).tenant)
    assert 14 <= order.count("comes") <= 16, order


def test_a_change_of_pool_earns_no_service() -> None:
    """A tenant that used prefill alone for long gets no output for free: unused capacity of a pool is not saved up."""
    queue: Queue = ReleaseQueue(100_000)
    for number in range(600):
        for tenant in ("changing", "steady"):
            outputs = 5000 if tenant == "changing" and number >= 500 else 1
            queue.add(Item(tenant=tenant, token_count=1000, output_tokens_max=outputs))
    for _ in range(1000):
        queue.settle_output(release_next(queue), 1)
    served: Counter[str] = Counter()
    for _ in range(60):
        item = release_next(queue)
        queue.settle_output(item, item.output_tokens_max)
        served[item.tenant] += 1
    assert served["changing"] <= 10, f"its outputs count ten times as much as the prompts: {served}"


def test_lower_classes_get_their_floor_unless_they_are_sheddable() -> None:
    """Each waiting lower class gets one of any FLOOR_EVERY releases; a class of sheddable requests gets none."""
    queue: Queue = ReleaseQueue(100_000)
    for number in range(2000):
        queue.add(Item(number, priority_class=6, tenant=f"t{number % 3}"))
        if number < 100:
            queue.add(Item(number, priority_class=4))
            queue.add(Item(number, priority_class=2, is_resumed=number % 2 == 0))
            queue.add(Item(number, priority_class=1, is_sheddable=True))
    priority_classes = [release_next(queue).priority_class for _ in range(2000)]
    for low in (2, 4):
        places = [
            -1,
            *(place for place, priority_class in enumerate(priority_classes) if priority_class == low),
        ]
        assert max(later - earlier for earlier, later in pairwise(places)) <= FLOOR_EVERY, low
        assert len(places) - 1 <= 2000 / (FLOOR_EVERY - 5)
    assert 1 not in priority_classes


def test_a_held_tenant_holds_up_no_other() -> None:
    """Others of its class go, and lower classes when no request of a higher one may; resumed requests are never held."""
    queue: Queue = ReleaseQueue(100)
    for tenant in ("held", "free"):
        queue.add(Item(tenant=tenant))
    low, again = Item(tenant="low", priority_class=1), Item(tenant="held", is_resumed=True)
    queue.add(low)
    assert [item.tenant for item in queue.heads(lambda tenant, _: tenant != "held")] == ["free"]
    assert list(queue.heads(lambda tenant, _: tenant == "low")) == [low]
    queue.add(again)
    assert next(queue.heads(lambda *_: False)) is again


def test_a_full_queue_still_takes_requeued_items() -> None:
    """The bounds apply to new requests. Resumed requests have the same bounds of their own. One item always fits."""
    queue: Queue = ReleaseQueue(2, tokens_max=10)
    first = Item(1, token_count=50)
    assert queue.victims(first) == []
    queue.add(first)
    assert queue.is_full(tokens=1) and queue.victims(Item(2)) is None
    assert not queue.is_full(is_resumed=True, tokens=50)
    queue.add(Item(3), at_head=True)
    queue.add(Item(4), at_head=True)
    assert [item.name for item in queue] == [4, 3, 1]


def test_the_work_of_the_queue_is_that_of_its_items() -> None:
    """Under random offers, evictions, releases, returns to the head and cancellations. It is 0 at the end."""
    for seed in range(4):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(40, tokens_max=2_000)
        waiting: set[Item] = set()
        released: list[Item] = []
        evicted_count = 0
        for name in range(300):
            kind = rng.random()
            if kind < 0.6:
                tokens = rng.randint(1, 200)
                item = Item(
                    name,
                    is_resumed=rng.random() < 0.1,
                    tenant=rng.choice("abc"),
                    priority_class=rng.choice((-1, 0, 4, 7)),
                    is_sheddable=rng.random() < 0.2,
                    token_count=tokens,
                    work=rng.randint(1, tokens),
                )
                victims = queue.victims(item)
                for victim in victims or ():
                    assert queue.remove(victim)
                    waiting.remove(victim)
                evicted_count += len(victims or ())
                if victims is not None:
                    queue.add(item)
                    waiting.add(item)
            elif kind < 0.8 and waiting:
                item = release_next(queue)
                waiting.remove(item)
                released.append(item)
            elif kind < 0.85 and released:
                item = released.pop()
                queue.add(item, at_head=True)
                waiting.add(item)
            elif waiting:
                item = rng.choice(sorted(waiting, key=lambda one: one.name))
                assert queue.remove(item) and not queue.remove(item)
                waiting.remove(item)
            assert queue.work == sum(item.ticket.work for item in waiting), f"{seed=}"
            queue.assert_consistent()
        assert evicted_count and len(queue) == len(waiting)
        for item in waiting:
            queue.remove(item)
        assert queue.work == 0


def test_the_least_important_goes_first() -> None:
    """Sheddable before others, low classes before high ones, then the last to be served; never for an equal or a lesser
    one."""
    for seed in range(20):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(30, tokens_max=3000)
        for name in range(200):
            item = Item(
                name,
                rng.choice((0, 0, 5)),
                rng.random() < 0.05,
                tenant=f"t{rng.randrange(4)}",
                priority_class=rng.choice((2, 4, 6)),
                is_sheddable=rng.random() < 0.3,
                token_count=rng.randrange(1, 400),
                order=rng.random() + 0.003 * name,
            )
            before = [one for one in queue if not one.is_resumed]
            victims = queue.victims(item)
            if item.is_resumed:
                assert victims in ([], None)
            elif victims is None:
                lesser = [
                    one
                    for one in before
                    if (not one.is_sheddable, one.priority_class)
                    < (not item.is_sheddable, item.priority_class)
                ]
                count = len(before) - len(lesser) + 1
                tokens = sum(one.token_count for one in before) - sum(one.token_count for one in lesser)
                assert count > 30 or tokens + item.token_count > 3000, (
                    f"{seed=}: lesser ones would have made room"
                )
            else:
                rank = [(not one.is_sheddable, one.priority_class) for one in victims]
                assert rank == sorted(rank) and all(
                    one <= (not item.is_sheddable, item.priority_class) for one in rank
                )
                kept = [one for one in before if one not in victims]
                for one in kept:
                    assert not victims or (not one.is_sheddable, one.priority_class) >= max(rank), f"{seed=}"
                assert all(
                    one.tenant != item.tenant
                    for one in victims
                    if lane_of(one)[0] == -item.priority_class and one.is_sheddable == item.is_sheddable
                ), "no tenant evicts its own requests"
                tenant_queues: dict[tuple[str, int, bool], list[Item]] = defaultdict(list)
                for one in before:
                    tenant_queues[one.tenant, one.priority_class, one.is_sheddable].append(one)
                for lane in tenant_queues.values():  # of each tenant the items that it would have served last
                    lane.sort(key=lambda one: (-one.priority, one.ticket.order))
                    gone = [one for one in lane if one in victims]
                    assert gone == lane[len(lane) - len(gone) :], f"{seed=}"
                for one in victims:
                    queue.remove(one)
                assert not queue.is_full(tokens=item.token_count)
            if victims is not None:
                queue.add(item)
            if rng.random() < 0.2 and len(queue):
                release_next(queue)
            queue.assert_consistent()


def test_the_largest_backlog_makes_room_for_the_smallest() -> None:
    """In one class the newest of the tenant that fills the queue goes; a tenant cannot evict others by sending more."""
    queue: Queue = ReleaseQueue(10)
    flood = [Item(name, tenant="flood", token_count=100) for name in range(10)]
    for item in flood:
        queue.add(item)
    quiet = Item(tenant="quiet", token_count=100)
    assert queue.victims(quiet) == [flood[-1]]
    queue.remove(flood[-1])
    queue.add(quiet)
    assert queue.victims(Item(tenant="flood")) is None


@pytest.mark.parametrize("counted", [16, 0])
def test_the_estimate_ahead_is_the_work_released_before(
    counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is right to within the largest request of each tenant; with many tenants it is never too low."""
    monkeypatch.setattr(tenant_queues, "TENANTS_COUNTED", counted)
    for seed in range(15):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(10_000)
        made: list[Item] = []
        for name in range(150):
            priority_class = rng.choice((2, 4, 4, 4, 6)) if seed % 2 else 4
            tokens, order = rng.randrange(1, 300), rng.random()
            made.append(
                Item(
                    name,
                    tenant=f"t{rng.randrange(4)}",
                    priority_class=priority_class,
                    token_count=tokens,
                    order=order,
                )
            )
            queue.add(made[-1])
        item = Item(tenant="t0", token_count=100, order=rng.random())
        estimate = queue.ahead(item)
        queue.add(item)
        real: dict[int, int] = defaultdict(int)
        while (head := release_next(queue)) is not item:
            real[head.priority_class] += head.token_count
        over = estimate - sum(real[priority_class] for priority_class in (4, 5, 6, 7))
        assert over >= -4 * 300 - 1 and (over <= 4 * 300 + 1 or not counted), f"{seed=}"
        assert estimate <= sum(one.token_count for one in made)


def test_the_estimate_ahead_is_exact_for_one_tenant() -> None:
    """Priority, length, requeued, resumed and sheddable requests count in the order of release, without cached tokens."""
    for seed in range(30):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(10_000)
        made = [
            Item(
                name,
                rng.choice((0, 0, 0, 7, -200)),
                rng.random() < 0.05,
                token_count=rng.randrange(100, 300),
                work=rng.randrange(1, 100),
                order=rng.choice((0.5, rng.random())),
                is_sheddable=rng.random() < 0.3,
            )
            for name in range(rng.choice((3, 150, 1000)))
        ]
        for item in made:
            queue.add(item, at_head=rng.random() < 0.05)
        for item in made[::3]:
            queue.remove(item)
        order, is_sheddable = rng.choice((0.5, rng.random())), rng.random() < 0.3
        item = Item(-1, rng.choice((0, 0, 7)), order=order, is_sheddable=is_sheddable)
        estimate, real = queue.ahead(item), 0
        queue.add(item)
        while (head := release_next(queue)) is not item:
            real += head.ticket.work
        assert estimate == real, f"{seed=}"


def test_a_long_request_is_overtaken_only_within_the_bound() -> None:
    """More short work comes than goes. The long request is released once no request may overtake it, not before."""
    long_s, short_s, now_s = 6.0, 0.3, 1.0
    queue: Queue = ReleaseQueue(10_000)
    long = Item(-1, order=shortest(long_s, now_s))
    queue.add(long)
    came_s: dict[Item, float] = {}
    for name in range(600):
        now_s += 0.1
        item = Item(name, order=shortest(short_s, now_s))
        came_s[item] = now_s
        queue.add(item)
        if name % 3 == 0 and (released := release_next(queue)) is long:
            break
        queue.assert_consistent()
    assert released is long
    last_s = max(at_s for item, at_s in came_s.items() if not item.ticket.number)
    assert overtaken_s(long_s, short_s) - 0.4 <= last_s - 1.0 <= overtaken_s(long_s, short_s)
    waiting = [item for item in came_s if item.ticket.number]
    assert all(came_s[item] - 1.0 >= overtaken_s(long_s, short_s) - 1e-9 for item in waiting)


def test_no_request_is_overtaken_later_than_the_bound() -> None:
    """Random lengths, arrivals and releases: a request that overtakes an older one came in time and is shorter enough."""
    for seed in range(15):
        rng = random.Random(seed)
        queue: Queue = ReleaseQueue(10_000)
        expected: dict[Item, tuple[float, float]] = {}
        waiting: list[Item] = []
        now_s, overtaken = 1000 * rng.random(), 0
        for name in range(500):
            now_s += rng.expovariate(10.0)
            if rng.random() < 0.55:
                seconds = min(20.0, rng.lognormvariate(-1.5, 1.3))
                item = Item(name, order=shortest(seconds, now_s))
                expected[item] = seconds, now_s
                waiting.append(item)
                queue.add(item)
            elif waiting:
                item = release_next(queue)
                waiting.remove(item)
                seconds, at_s = expected[item]
                for other in waiting:
                    other_s, other_at_s = expected[other]
                    if other_at_s < at_s:
                        assert at_s - other_at_s <= overtaken_s(other_s, seconds) + 1e-9, f"{seed=}"
                        overtaken += 1
        assert overtaken > 20, "overtaking is what this is about"


def test_tenants_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of tenants, a bounded number is remembered."""
    monkeypatch.setattr(fairness, "IDLE_ACCOUNTS_MAX", 10)
    queue: Queue = ReleaseQueue(10_000)
    for name in range(200):
        queue.add(Item(name, tenant=f"t{name}"))
        if name % 3:
            release_next(queue)
        queue.assert_consistent()
    while len(queue):
        release_next(queue)
    assert len(queue._priority_classes[PRIORITY_CLASS_DEFAULT].fairness) <= 11
