"""The router's estimate of a prefill queue, against the queue itself."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest

from kvmesh.queue_order import ORDERS, OrderKey
from services.prefill.queue import PrefillQueue
from services.prefill.slot import PrefillSlot
from services.router.placement.backlog import Backlog, Work
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence
from tests.unit.prefill.test_queue import slot

REPLICA = "p0"


@dataclass
class Engine:
    """A prefill queue and its engine, which has up to `depth` prompts and computes them one after the other."""

    queue: PrefillQueue
    depth: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Actual seconds of each prompt."""
    held: list[str] = field(default_factory=list)
    begun_s: dict[str, float] = field(default_factory=dict)
    given: list[tuple[str, float]] = field(default_factory=list)
    """Prompts given to the engine, and the times."""
    ended: list[tuple[str, float]] = field(default_factory=list)

    def submit(self, one: PrefillSlot, seconds: float, now_s: float) -> None:
        """Queue a prompt."""
        self.seconds[one.submitted.request_id] = seconds
        self.queue.push(one)
        self.fill(now_s)

    def ends_s(self) -> float:
        """Return when the running prompt is done."""
        return self.begun_s[self.held[0]] + self.seconds[self.held[0]] if self.held else float("inf")

    def until(self, now_s: float) -> None:
        """Let time pass."""
        while (end_s := self.ends_s()) <= now_s and self.held:
            self.ended.append((self.held.pop(0), end_s))
            self.fill(end_s)

    def fill(self, now_s: float) -> None:
        """Give the engine prompts up to its depth."""
        while len(self.held) < self.depth and (head := self.queue.head()) is not None:
            self.queue.take(head)
            self.held.append(head.submitted.request_id)
            self.given.append((head.submitted.request_id, now_s))
        if self.held:
            self.begun_s.setdefault(self.held[0], now_s)

    def begins_s(self, request_id: str) -> float:
        """Return when the prompt would start if no prompt came any more."""
        alone = copy.deepcopy(self)
        alone.until(1e12)
        return alone.begun_s[request_id]


@dataclass
class EstimatedWait:
    """One prompt: its wait as estimated by the router, without later prompts, and its actual wait."""

    name: str
    precedence: Precedence
    seconds: float
    came_s: float
    router_s: float
    blind_s: float
    """The estimate as if all prompts were of one tenant and one priority class."""
    alone_s: float


def schedule(
    rng: random.Random, key: OrderKey, tenants: dict[str, float], *, count: int, load: float
) -> tuple[Engine, list[EstimatedWait]]:
    """Serve random prompts, with the router's estimate before each is sent. The router hears of starts and ends at once."""
    engine = Engine(PrefillQueue(10_000, key), depth=rng.choice((1, 2)))
    backlog, blind = Backlog("r0", key), Backlog("r1", key)
    seen: list[EstimatedWait] = []
    now_s = 1000 * rng.random()
    for number in range(count):
        now_s += rng.expovariate(1) * 0.5 / load
        name, seconds = str(number), min(20.0, 0.01 + rng.lognormvariate(-1.5, 1.3))
        precedence = DEFAULT_PRECEDENCE
        if len(tenants) > 1:
            tenant = rng.choice(list(tenants))
            priority_class, is_resumed = rng.choice((4, 4, 4, 5)), rng.random() < 0.05
            precedence = Precedence(
                priority_class, is_resumed, tenant, tenants[tenant], rng.choice((0, 0, 1))
            )
        engine.until(now_s)
        tell(engine, backlog, blind)
        estimated_s = backlog.queue_s(REPLICA, seconds, now_s, precedence)
        blind_s = blind.queue_s(REPLICA, seconds, now_s)
        tokens = round(1000 * seconds)
        work = Work(("r0", name), REPLICA, (), seconds, now_s, 1e12, precedence=precedence, tokens=tokens)
        backlog.add(work)
        blind.add(Work(("r0", name), REPLICA, (), seconds, now_s, 1e12))
        engine.submit(
            slot(
                name,
                priority_class=precedence.priority_class,
                tenant=precedence.tenant,
                weight=precedence.weight,
                priority=precedence.priority,
                resumed=precedence.is_resumed,
                tokens=tokens,
                expected_s=seconds,
                at_s=now_s,
            ),
            seconds,
            now_s,
        )
        tell(engine, backlog, blind)
        alone_s = engine.begins_s(name) - now_s
        seen.append(EstimatedWait(name, precedence, seconds, now_s, estimated_s, blind_s, alone_s))
    engine.until(1e12)
    tell(engine, backlog, blind)
    assert not len(backlog) and not len(blind)
    return engine, seen


def tell(engine: Engine, *backlogs: Backlog) -> None:
    """Tell the routers of starts and ends, in their order."""
    events = [(at_s, 1, name) for name, at_s in engine.given] + [
        (at_s, 0, name) for name, at_s in engine.ended
    ]
    for at_s, is_start, name in sorted(events):
        for backlog in backlogs:
            if is_start:
                backlog.start(("r0", name), at_s)
            else:
                backlog.remove(("r0", name), at_s)
            backlog.assert_consistent()
    engine.given.clear()
    engine.ended.clear()


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("seed", range(4))
def test_the_router_estimates_the_start_of_a_prompt(seed: int, order: str) -> None:
    """To the microsecond, if no prompt comes any more. Later prompts delay short ones little."""
    print(f"seed={seed}")
    engine, seen = schedule(random.Random(seed), ORDERS[order], {"": 1.0}, count=200, load=0.85)
    waits = [engine.begun_s[one.name] - one.came_s for one in seen]
    for one, wait_s in zip(seen, waits, strict=True):
        assert abs(one.router_s - one.alone_s) < 1e-6, one
        assert wait_s > one.router_s - 1e-6, one
        if order == "fifo":
            assert abs(wait_s - one.router_s) < 1e-6, one
    mean_s = sum(waits) / len(waits)
    late_s = sum(wait_s - one.router_s for one, wait_s in zip(seen, waits, strict=True)) / len(waits)
    assert late_s < 0.4 * mean_s, (late_s, mean_s)


@pytest.mark.parametrize("seed", range(6))
def test_among_tenants_it_is_off_by_little(seed: int) -> None:
    """Classes, resumed prompts, priorities and weights are known. The service that tenants have had is not."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    tenants = {name: rng.choice((0.5, 1.0, 2.0)) for name in ("a", "b", "c")}
    _, seen = schedule(rng, ORDERS["shortest"], tenants, count=200, load=1.0)
    mean_s = sum(one.alone_s for one in seen) / len(seen)
    off_s = sum(abs(one.router_s - one.alone_s) for one in seen) / len(seen)
    blind_s = sum(abs(one.blind_s - one.alone_s) for one in seen) / len(seen)
    print(f"mean wait {mean_s:.2f} s, off by {off_s:.2f} s, without tenants {blind_s:.2f} s")
    assert off_s < 0.2 * mean_s
    assert off_s < 0.6 * blind_s
