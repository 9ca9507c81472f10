"""Propagation delay of dispatches between routers over a real Redis.

Each router is played by this module as a process, with a router's policy and gossip. All routers run on one machine and
share its monotonic clock. The time of a dispatch is part of its request id.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

from bench import control
from bench.processes import ANY_CORE, Fleet, Process, ask_all
from bench.results import BenchError, ScenarioResults, quantile
from bench.windows import Pace
from kvmesh import blocks
from kvmesh.clock import MonotonicClock
from kvmesh.redis_link import RedisLink
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.gossip.peer_routers import known_dispatches
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import DISPATCH_LIFE_S, Dispatched, Event, Finished, Started

CASES = ((2, 50), (4, 50), (2, 500))
"""Routers, and dispatches per second of each router."""
ALONE_PER_S = (50, 500)
"""Dispatches per second of a router without peers: what its policy and the load's timers take without gossip."""
MESH = "bench"
REPLICA = "prefill-0"
BLOCKS = 128
"""Blocks of a prompt of 4,096 tokens."""
OPEN_S = 0.2
"""From a prompt's dispatch to its finish. The prompt starts halfway."""
HEARD_MIN = 100
SETTLE_S = 0.3
"""Pause after a run, in which all messages arrive."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    seconds = 4.0 if pace.is_quick else 10.0
    for per_s in ALONE_PER_S:
        with Fleet() as fleet:
            probes = _met(fleet, 1)
            (alone,) = ask_all(probes, "dispatch", per_s=per_s, seconds=seconds)
            results.add(f"1 router, {per_s} dispatches/s", "CPU per own dispatch", "us", alone["cpu_us"])
    for count, per_s in CASES:
        with Fleet() as fleet:
            probes = _met(fleet, count)
            told = ask_all(probes, "dispatch", per_s=per_s, seconds=seconds)
            heard = ask_all(probes, "tell")
            left = sum(each["left"] for each in heard)
            if left:
                raise BenchError(f"{left:.0f} dispatches are still counted after their finish")
            case = f"{count} routers, {per_s} dispatches/s each"
            for name in ("p50", "p99", "max"):
                worst = max(each[f"{name}_ms"] for each in heard)
                results.add(case, f"propagation delay, {name}", "ms", worst)
            results.add(case, "CPU per own dispatch", "us", max(each["cpu_us"] for each in told))
            results.add(case, "repaired by anti-entropy digests", "", sum(each["healed"] for each in heard))


def _met(fleet: Fleet, count: int) -> list[Process]:
    """Start `count` routers, and return them once they know each other's state."""
    redis_url = fleet.redis()
    names = [f"router-{number}" for number in range(count)]
    probes = [fleet.start_ready(name, __name__, ANY_CORE, name=name, redis=redis_url) for name in names]
    ask_all(probes, "meet", routers=names)
    return probes


class DispatchProbe:
    """The policy and the gossip of one router."""

    def __init__(self, name: str, redis_url: str) -> None:
        self.name = name
        self.delays_s: list[float] = []
        """Propagation delays: from the dispatch by another router until the policy here counts it."""
        self.policy = CostPolicy(
            name,
            LocalPrefixIndex(),
            random.Random(1),
            block_tokens=32,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=0,
        )
        self.policy.local_index.add(REPLICA)
        self.redis = RedisLink(redis_url)
        self.dispatches = DispatchGossip(
            self.redis,
            MESH,
            name,
            f"boot-{name}",
            self._observe,
            known_dispatches(self.policy.backlog),
            lambda replica: replica == REPLICA,
        )
        self._clock = MonotonicClock()
        self._draw = random.Random(name)

    def _observe(self, event: Event) -> None:
        self.policy.observe(event)
        if isinstance(event, Dispatched):
            self.delays_s.append((time.monotonic_ns() - int(event.request_id[:16], 16)) / 1e9)

    def _tell(self, event: Dispatched | Started | Finished) -> None:
        self.policy.observe(event)
        self.dispatches.publish(event)

    async def meet(self, routers: list[str]) -> None:
        """Set the {routers}, and wait until their state is known."""
        self.dispatches.set_routers((name, f"boot-{name}") for name in routers)
        async with asyncio.timeout(10):
            while not self.dispatches.is_caught_up():
                await asyncio.sleep(0.001)

    async def dispatch(self, per_s: float, seconds: float) -> Mapping[str, Any]:
        """Dispatch {per_s} prompts a second for {seconds}, at random moments. Return CPU per prompt, in us."""
        self.delays_s.clear()
        cpu_s, count = time.process_time(), 0
        end_s = time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        while time.monotonic() < end_s:
            await asyncio.sleep(self._draw.expovariate(per_s))
            now_s = self._clock.now_s()
            request_id = f"{time.monotonic_ns():016x}{self._draw.getrandbits(64):016x}"
            hashes = blocks.unpack(self._draw.randbytes(8 * BLOCKS))
            expires_s = now_s + DISPATCH_LIFE_S
            self._tell(Dispatched(self.name, request_id, REPLICA, hashes, OPEN_S / 2, now_s, expires_s))
            loop.call_later(OPEN_S / 2, self._start, request_id)
            loop.call_later(OPEN_S, self._finish, request_id)
            count += 1
        return {"count": count, "cpu_us": (time.process_time() - cpu_s) / max(1, count) * 1e6}

    def _start(self, request_id: str) -> None:
        self._tell(Started(self.name, request_id, self._clock.now_s()))

    def _finish(self, request_id: str) -> None:
        self._tell(Finished(self.name, request_id, self._clock.now_s()))

    async def tell(self) -> Mapping[str, Any]:
        """Return quantiles of the propagation delay (ms), and the dispatches still counted after all have finished."""
        await asyncio.sleep(OPEN_S + SETTLE_S)
        delays_ms = [1e3 * each for each in self.delays_s]
        if len(delays_ms) < HEARD_MIN:
            raise RuntimeError(f"{len(delays_ms)} dispatches received, at least {HEARD_MIN} needed")
        return {
            "heard": len(delays_ms),
            "p50_ms": quantile(delays_ms, 0.5),
            "p99_ms": quantile(delays_ms, 0.99),
            "max_ms": max(delays_ms),
            "left": len(self.policy.backlog),
            "healed": self.dispatches.peer_routers.repaired_total,
        }


async def serve(name: str, redis: str) -> None:
    """Serve until stdin ends."""
    probe = DispatchProbe(name, redis)
    running = asyncio.create_task(probe.dispatches.run(), name="dispatches")
    await control.serve_commands(probe.meet, probe.dispatch, probe.tell)
    running.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)
