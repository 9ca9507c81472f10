"""No prompt waits in the prefill queue beyond the bound of kvmesh.queue_order and services.prefill.queue."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from kvmesh.queue_order import AGING, fifo, shortest
from services.prefill.queue import FLOOR_EVERY, PrefillQueue
from services.prefill.slot import PrefillSlot
from tests.unit.overtaking import overtaken_s
from tests.unit.prefill.test_queue import slot

EPSILON = 1e-9


@dataclass
class Run:
    """One prompt in an engine."""

    one: PrefillSlot
    really_s: float
    started_s: float = float("inf")
    rank: int = -1
    """Number of starts before its own."""

    @property
    def came_s(self) -> float:
        """Time of its arrival."""
        return self.one.submitted.submitted_s

    @property
    def wait_s(self) -> float:
        """Its waiting time."""
        return self.started_s - self.came_s

    def may_go_before(self, other: Run) -> bool:
        """True if it may start before `other` of the same tenant and class while both wait."""
        if self.one.submitted.priority != other.one.submitted.priority and not self.one.submitted.is_resumed:
            return self.one.submitted.priority > other.one.submitted.priority
        later_s = self.came_s - other.came_s
        return later_s <= overtaken_s(
            other.one.submitted.expected_s, self.one.submitted.expected_s
        ) + EPSILON and (
            self.one.submitted.expected_s + AGING * later_s <= other.one.submitted.expected_s + EPSILON
        )


def run(queue: PrefillQueue, prompts: Iterable[Run], concurrency: int) -> list[Run]:
    """Serve `prompts`, ordered by arrival, with `concurrency` engine slots that are never idle while a prompt waits."""
    by_slot: dict[PrefillSlot, Run] = {}
    running: list[float] = []
    started: list[Run] = []

    def fill(now_s: float) -> None:
        while running and running[0] <= now_s:
            heapq.heappop(running)
        while len(running) < concurrency and (head := queue.head()) is not None:
            queue.take(head)
            prompt = by_slot[head]
            prompt.started_s, prompt.rank = now_s, len(started)
            started.append(prompt)
            heapq.heappush(running, now_s + prompt.really_s)

    def until(now_s: float) -> None:
        while running and running[0] <= now_s:
            fill(running[0])

    for prompt in prompts:
        until(prompt.came_s)
        by_slot[prompt.one] = prompt
        queue.push(prompt.one)
        fill(prompt.came_s)
    until(float("inf"))
    assert len(started) == len(by_slot) and not len(queue), "a prompt was lost"
    return started


def prompts(
    rng: random.Random, count: int, load: float, make: Callable[[int, float, float], PrefillSlot]
) -> list[Run]:
    """Return prompts in bursts, few of them very long. Their real seconds differ a little from the predicted ones."""
    made, now_s = [], 1000 * rng.random()
    for number in range(count):
        expected_s = min(20.0, 0.01 + rng.lognormvariate(-1.5, 1.3))
        if rng.random() < 0.3:
            now_s += rng.expovariate(1) * 0.5 / 0.3 / load
        made.append(Run(make(number, expected_s, now_s), expected_s * rng.lognormvariate(0.0, 0.3)))
    return made


def bound_s(prompt: Run, prompts_all: list[Run], concurrency: int) -> float:
    """Return the longest wait of `prompt` in a queue with one tenant and one class."""
    came_s = prompt.came_s
    total = 0.0
    for other in prompts_all:
        if other is prompt:
            continue
        if other.started_s < came_s or (other.started_s == came_s and other.rank < prompt.rank):
            total += max(0.0, other.started_s + other.really_s - came_s)
        elif other.may_go_before(prompt):
            total += other.really_s
    return total / concurrency


@pytest.mark.parametrize("seed", range(8))
def test_no_prompt_waits_beyond_the_bound(seed: int) -> None:
    """A prompt waits for earlier prompts and those that may overtake it. No other prompt overtakes it."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    concurrency, load = rng.choice((1, 2, 3)), rng.choice((0.8, 1.2, 3.0))

    def make(number: int, expected_s: float, at_s: float) -> PrefillSlot:
        priority = rng.choice((0, 0, 0, 0, 1))
        return slot(str(number), expected_s=expected_s, at_s=at_s, priority=priority)

    started = run(PrefillQueue(1000), prompts(rng, 400, load * concurrency, make), concurrency)
    overtaken = 0
    for prompt in started:
        before = [one for one in started[: prompt.rank] if one.started_s >= prompt.came_s]
        assert all(one.may_go_before(prompt) or one.started_s == prompt.came_s for one in before), prompt
        overtaken += any(one.came_s > prompt.came_s for one in before)
        assert prompt.wait_s <= bound_s(prompt, started, concurrency) + 1e-6, prompt
    assert overtaken > 20, "overtaking must occur"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_long_prompt_is_served_in_a_flood_of_short_ones(concurrency: int) -> None:
    """More short prompts come than can be served. The long one starts once no prompt may overtake it."""
    long = Run(slot("long", expected_s=6.0, at_s=1.0), 6.0)
    flood = [
        Run(slot(str(number), expected_s=0.3, at_s=0.1 * number / concurrency), 0.3)
        for number in range(600 * concurrency)
    ]
    prompts_all = sorted([*flood, long], key=lambda prompt: prompt.came_s)
    run(PrefillQueue(10_000), prompts_all, concurrency)
    allowed_s = overtaken_s(6.0, 0.3)
    assert long.wait_s <= bound_s(long, prompts_all, concurrency) + 1e-6
    assert long.wait_s > allowed_s, "it should be overtaken for the allowed time"
    last = max(one.came_s for one in flood if one.started_s < long.started_s)
    assert allowed_s - 0.2 <= last - long.came_s <= allowed_s


@pytest.mark.parametrize("seed", range(8))
def test_other_tenants_classes_and_resumed_prompts_delay_within_the_bound(seed: int) -> None:
    """Before a prompt, its tenant starts only prompts that may precede it. Other tenants and classes start their shares."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    weights = {name: rng.choice((0.25, 1.0, 4.0)) for name in ("a", "b", "c", "d")}

    def make(number: int, expected_s: float, at_s: float) -> PrefillSlot:
        tenant = rng.choice(("a", "a", "a", "b", "c", "d"))
        return slot(
            str(number),
            tenant=tenant,
            weight=weights[tenant],
            priority_class=rng.choice((3, 4, 4, 4, 5)),
            priority=rng.choice((0, 0, 0, 1)),
            resumed=rng.random() < 0.1,
            tokens=max(1, round(1000 * expected_s * rng.random())),
            expected_s=expected_s,
            at_s=at_s,
        )

    started = run(PrefillQueue(1000), prompts(rng, 500, rng.choice((1.0, 3.0)), make), 1)
    longest = {
        name: max(
            prompt.one.submitted.prompt_tokens for prompt in started if prompt.one.submitted.tenant == name
        )
        for name in weights
    }
    for prompt in started:
        one = prompt.one
        before = [other for other in started[: prompt.rank] if other.started_s >= prompt.came_s]
        before = [other for other in before if other.started_s > prompt.came_s]
        of_band = [
            other for other in before if other.one.submitted.priority_class == one.submitted.priority_class
        ]
        assert len(before) <= FLOOR_EVERY * 3 * (len(of_band) + 1), prompt
        if one.submitted.is_resumed:
            assert all(other.one.submitted.is_resumed and other.may_go_before(prompt) for other in of_band), (
                prompt
            )
            continue
        turns = [other for other in of_band if not other.one.submitted.is_resumed]
        own = [other for other in turns if other.one.submitted.tenant == one.submitted.tenant]
        assert all(other.may_go_before(prompt) for other in own), prompt
        own_tokens = sum(other.one.submitted.prompt_tokens for other in own) + longest[one.submitted.tenant]
        for name, weight in weights.items():
            tokens = sum(
                other.one.submitted.prompt_tokens for other in turns if other.one.submitted.tenant == name
            )
            allowed = weight / one.submitted.weight * own_tokens + longest[name]
            assert name == one.submitted.tenant or tokens <= allowed + 1e-6, (prompt, name, tokens, allowed)


@pytest.mark.parametrize("seed", range(3))
def test_shortest_job_first_makes_the_mean_wait_small(seed: int) -> None:
    """At 80 % load the mean wait is well below that of first come, first served."""
    print(f"seed={seed}")
    means = []
    for key in (fifo, shortest):
        rng = random.Random(seed)
        prompts_all = prompts(
            rng, 1500, 0.75, lambda number, long_s, at_s: slot("", expected_s=long_s, at_s=at_s)
        )
        means.append(sum(prompt.wait_s for prompt in run(PrefillQueue(10_000, key), prompts_all, 1)) / 1500)
    assert means[1] < 0.8 * means[0], means
