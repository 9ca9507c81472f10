"""The estimated drain rate of a resource, and the accuracy of the Retry-After computed from it."""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest

from kvmesh.drain_rate import MEMORY_S, RETRY_MS_MAX, RETRY_MS_MIN, SEEN_MIN_S, DrainRate, Stock

KINDS = list(Stock)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_unknown_before_the_first_drain(kind: Stock) -> None:
    """Without a sample, the drain rate is unknown; waiting for nothing takes no time."""
    rate = DrainRate(kind)
    assert rate.per_s(10.0) is None and rate.retry_ms(5, 10.0) == 0
    rate.stock(5, 10.0)
    assert rate.wait_s(5, 100.0) is None and rate.retry_ms(5, 100.0) == 0
    assert rate.wait_s(0, 100.0) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_steady_stream_is_measured(seed: int, kind: Stock) -> None:
    """After twice the memory, a steady drain rate is known within a third, for any size of the steps."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    per_s = 10 ** rng.uniform(1.0, 4.0)
    rate, now_s = DrainRate(kind), 1000.0
    rate.stock(10 * per_s, now_s)
    while now_s < 1000 + 2 * MEMORY_S:
        now_s += rng.expovariate(20.0)
        rate.freed(per_s / 20, now_s)
    assert rate.per_s(now_s) == pytest.approx(per_s, rel=0.33)
    assert 660 <= rate.retry_ms(per_s, now_s) <= 1500


@pytest.mark.parametrize("kind", KINDS)
def test_first_drains_change_little_and_a_stall_makes_waits_longer(kind: Stock) -> None:
    """The first drains change the rate little; without drains the wait grows, up to its bound."""
    rate = DrainRate(kind)
    rate.stock(1000, 10.0)
    rate.freed(100, 10.001)
    assert rate.per_s(10.001) == pytest.approx(100 / SEEN_MIN_S)
    waits = [rate.retry_ms(100, 11.0 + pause_s) for pause_s in (0, 2, 5, 20, 1000)]
    assert waits == sorted(waits) and waits[0] < waits[1] and waits[-1] == RETRY_MS_MAX
    assert rate.retry_ms(100, 1e6) == RETRY_MS_MAX, "a level decayed to 0"


def test_events_at_one_moment_add_up() -> None:
    """Holds and drains at one moment add up; items that leave a queue at their arrival do not count."""
    held, queue = DrainRate(Stock.HELD), DrainRate(Stock.QUEUE)
    for rate in (held, queue):
        rate.stock(10, 5.0)
        for _ in range(10):
            rate.freed(1, 5.0)
    assert held.retry_ms(10, 5.0) > 0 and queue.retry_ms(10, 5.0) == 0
    assert held.retry_ms(0, 5.0) == RETRY_MS_MIN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_idle_time_does_not_change_the_rate(seed: int, kind: Stock) -> None:
    """Idle times do not change the rate: two estimators, one with idle times up to an hour, agree."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    steady, idle = DrainRate(kind), DrainRate(kind)
    steady_s, idle_s = 100.0, 5000.0
    for _ in range(rng.randint(1, 10)):
        for _ in range(rng.randint(1, 20)):
            stock, freed, pause_s = rng.randint(1, 100), rng.randint(0, 10), rng.expovariate(3.0)
            for rate, now_s in ((steady, steady_s), (idle, idle_s)):
                rate.stock(stock, now_s)
                if freed:
                    rate.freed(freed, now_s + pause_s)
            steady_s, idle_s = steady_s + pause_s, idle_s + pause_s
        idle.stock(0, idle_s)
        idle_s += rng.choice((0.0, 1.0, 3600.0)) * rng.random()
    steady.stock(50, steady_s)
    idle.stock(50, idle_s)
    told = steady.wait_s(7, steady_s + 1.0)
    assert idle.wait_s(7, idle_s + 1.0) == (pytest.approx(told, rel=1e-6) if told is not None else None)


class House:
    """A resource of `places` slots, each held for a random time; a pause delays all ends.

    Records promised and actual waits.
    """

    def __init__(self, draw: random.Random, places: int, stay_s: float) -> None:
        self.draw, self.places, self.stay_s = draw, places, stay_s
        self.rate = DrainRate(Stock.HELD)
        self.now_s = 1000.0
        self.ends: list[float] = []
        self.told: list[tuple[float, float]] = []
        """(promised, actual) seconds until a slot is free."""
        self._asked: list[tuple[float, float]] = []

    def until(self, at_s: float) -> None:
        """Process the ends due until `at_s`."""
        while self.ends and self.ends[0] <= at_s:
            self.now_s = heapq.heappop(self.ends)
            self.rate.freed(1, self.now_s)
            self.rate.stock(len(self.ends), self.now_s)
            self.told += [(told_s, self.now_s - asked_s) for told_s, asked_s in self._asked]
            self._asked.clear()
        self.now_s = max(self.now_s, at_s)

    def enter(self) -> None:
        """Let a request arrive: it takes a slot, or gets a promised wait."""
        if len(self.ends) < self.places:
            heapq.heappush(self.ends, self.now_s + self.draw.expovariate(1 / self.stay_s))
            self.rate.stock(len(self.ends), self.now_s)
        elif (told_s := self.rate.wait_s(1, self.now_s)) is not None:
            self._asked.append((told_s, self.now_s))

    def come(self, per_s: float, for_s: float) -> None:
        """Let requests arrive at random, `per_s` per second."""
        end_s = self.now_s + for_s
        while (at_s := self.now_s + self.draw.expovariate(per_s)) < end_s:
            self.until(at_s)
            self.enter()
        self.until(end_s)

    def pause(self, for_s: float) -> None:
        """Stall the engine."""
        self.ends = [at_s + for_s for at_s in self.ends]

    def honesty(self) -> float:
        """Return the promised seconds per actual second of waiting."""
        assert len(self.told) >= 20, "too few refused requests for a verdict"
        return sum(min(told, 30.0) for told, _ in self.told) / sum(took for _, took in self.told)


@pytest.mark.parametrize("seed", range(12))
def test_a_request_without_a_slot_is_told_the_actual_wait(seed: int) -> None:
    """Refused requests are promised the actual wait within a factor of 2, on average.

    Crowds come after idle hours and after quiet times. A rate by the clock alone would reflect the quiet
    times: a tenth of the slots, so ten times the wait.
    """
    print(f"seed={seed}")
    draw = random.Random(seed)
    house = House(draw, places=draw.randint(8, 64), stay_s=draw.uniform(0.2, 5.0))
    full_per_s = house.places / house.stay_s
    for _ in range(8):
        house.come(0.1 * full_per_s, draw.uniform(5.0, 20.0))
        house.until(house.now_s + draw.choice((0.0, 600.0, 3600.0)))
        house.come(3 * full_per_s, draw.uniform(1.0, 8.0))
    assert 0.5 <= house.honesty() <= 2.0, house.honesty()


@pytest.mark.parametrize("seed", range(12))
def test_a_pause_lengthens_the_wait_and_is_forgotten(seed: int) -> None:
    """During a pause the promised wait grows up to its bound; some memories later the pause has no effect."""
    print(f"seed={seed}")
    draw = random.Random(seed)
    house = House(draw, places=draw.randint(8, 64), stay_s=draw.uniform(0.2, 2.0))
    full_per_s = house.places / house.stay_s
    house.come(3 * full_per_s, 20.0)
    pause_s = draw.uniform(5.0, 30.0)
    house.pause(pause_s)
    waits = [house.rate.retry_ms(1, house.now_s + share * pause_s) for share in (0.0, 0.3, 0.6, 1.0)]
    assert waits == sorted(waits) and waits[-1] <= RETRY_MS_MAX
    longest_s = house.rate.wait_s(1, house.now_s + pause_s)
    house.come(3 * full_per_s, pause_s + 4 * MEMORY_S)
    house.told.clear()
    house.come(3 * full_per_s, 10.0)
    assert 0.5 <= house.honesty() <= 2.0, house.honesty()
    told_s = house.rate.wait_s(1, house.now_s)
    assert longest_s is not None and told_s is not None and told_s < longest_s


@pytest.mark.parametrize("seed", range(12))
def test_a_queued_request_is_told_the_actual_wait(seed: int) -> None:
    """Queued requests are promised the actual wait within a factor of 2, on average.

    The queue is served at one pace, in crowds with idle times and short standstills between.
    """
    print(f"seed={seed}")
    draw = random.Random(seed)
    per_s, rate, now_s = 10 ** draw.uniform(0.5, 2.5), DrainRate(Stock.QUEUE, freed_min=8), 1000.0
    told: list[tuple[float, float]] = []
    for _ in range(10):
        queue: deque[tuple[float | None, float]] = deque()
        for _ in range(round(per_s * draw.uniform(2.0, 10.0))):  # a crowd comes at once
            queue.append((rate.wait_s(len(queue) + 1, now_s), now_s))
            rate.stock(len(queue), now_s)
        while queue:
            now_s += draw.expovariate(per_s) + (0.3 if draw.random() < 0.3 / per_s else 0.0)
            told_s, asked_s = queue.popleft()
            rate.freed(1, now_s)
            rate.stock(len(queue), now_s)
            if told_s is not None:
                told.append((told_s, now_s - asked_s))
        now_s += draw.choice((0.0, 1.0, 3600.0))
    honesty = sum(told_s for told_s, _ in told) / sum(took_s for _, took_s in told)
    assert len(told) > 20 and 0.5 <= honesty <= 2.0, honesty
