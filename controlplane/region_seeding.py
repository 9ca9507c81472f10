"""Seeds the own region with hot prompts of another one, before and while its callers come here. Effects only.

The leader asks the routers of each other region for their hot prompts, so that they are known when that region dies without
a warning. The prompts stay in memory, bounded, and are forgotten with the process. A router leaves out prompts of tenants
that may not be served here. The replay has the lowest priority, and is bounded by the grant of the source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.actions import AppendEvent
from controlplane.loop import ControlLoop
from controlplane.pools.registry import is_in_use
from controlplane.region_control import RegionControl
from controlplane.warmup.hot_record import HotQuestion, HotRecord
from controlplane.warmup.jobs import Job, Result, SeedJob, SeedResult, Target
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
ASK_S: Final = 30.0
"""Time between two questions to the routers of a region. A router needs some 20 ms for an answer."""

AGAIN_S: Final = 60.0
"""Time between two seedings from one region."""

SEED_S: Final = 30.0
"""Longest seeding."""

TIME_SHARE: Final = 0.1
"""Part of a replica's time that seeding takes. Users are served meanwhile, and moved conversations bring their prompts."""

BLOCKS_MAX: Final = 4096
"""Distinct blocks that are remembered of a region."""

Ask = Callable[[HotQuestion], Awaitable[HotRecord]]
Run = Callable[[Job], Awaitable[Result]]


@dataclass(slots=True)
class _Source:
    """Another region."""

    asked_s: float = float("-inf")
    seeded_s: float = float("-inf")
    model_version: str = ""
    prefixes: tuple[bytes, ...] = ()
    """Token ids of its hot prefixes, the heaviest first."""


class RegionSeeding:
    """See the module. The task of `background` owns it."""

    def __init__(self, loop: ControlLoop, regions: RegionControl, ask: Ask, run: Run, clock: Clock) -> None:
        """`ask` asks routers of another region; `run` runs a job of a warm-up."""
        self._loop = loop
        self._regions = regions
        self._ask = ask
        self._run = run
        self._clock = clock
        self._sources = {name: _Source() for name in regions.regions.targets}

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the task, with its name."""
        yield "region-seeding", persist(self._keep, "region-seeding", pause_s=LOOK_S)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._loop.core.leads:
                self._sources = {name: _Source() for name in self._sources}
                continue
            for name, source in self._sources.items():
                if self._clock.now_s() - source.asked_s >= ASK_S:
                    await self._learn(name, source)
            for name, reason in self._regions.seeding_sources(self._clock.now_s()).items():
                found = self._sources[name]
                if found.prefixes and self._clock.now_s() - found.seeded_s >= AGAIN_S:
                    await self._seed(name, found, reason)

    async def _learn(self, name: str, source: _Source) -> None:
        """Ask the routers of a region what is hot there. What is known stays if none of them answers."""
        entry = self._regions.entry(name)
        routers = [each for each in entry.routers if each.model_version == entry.stable_version]
        if not routers:
            return
        source.asked_s = self._clock.now_s()
        asked = tuple((each.process_id, each.address) for each in routers)
        record = await self._ask(
            HotQuestion(asked, entry.stable_version, routers[0].block_tokens, BLOCKS_MAX, 1, LOOK_S * 3)
        )
        if record.prefixes:
            source.model_version = entry.stable_version
            source.prefixes = tuple(each.token_ids for each in record.prefixes)

    async def _seed(self, name: str, source: _Source, reason: str) -> None:
        """Replay the hot prompts of a region on the own replicas that run prompts."""
        targets = self._targets(source.model_version)
        blocks = min(BLOCKS_MAX, int(self._regions.regions.grants()[name].blocks))
        if not targets or blocks < 1:
            return
        source.seeded_s = self._clock.now_s()
        end_s = source.seeded_s + SEED_S
        jobs = [
            SeedJob(
                target,
                (),
                (),
                max(1, blocks // len(targets)),
                end_s,
                is_replay=True,
                package_prefixes=source.prefixes[at :: len(targets)],
                time_share=TIME_SHARE,
            )
            for at, target in enumerate(targets)
        ]
        results = [
            each
            for each in await asyncio.gather(*(self._run(job) for job in jobs))
            if isinstance(each, SeedResult)
        ]
        if results and not any(each.error for each in results) and any(each.prefixes for each in results):
            self._regions.on_seeded_here(name, self._clock.now_s())
        self._loop.store.append(AppendEvent("region.seeded", name, _told(results, reason)))
        self._loop.touch()

    def _targets(self, model_version: str) -> list[Target]:
        """Return the serving prefill replicas of the version; without any, the decode replicas."""
        core = self._loop.core
        serving = [
            each
            for each in core.registry.ordered()
            if each.model_version == model_version and is_in_use(each, core.content.cordons)
        ]
        prefill = [each for each in serving if each.role == "prefill"]
        return [_target(each) for each in prefill or [each for each in serving if each.role == "decode"]]


def _target(member: Member) -> Target:
    return Target(
        member.process_id,
        member.boot_id,
        member.engine_boot_id,
        member.role,
        member.pool,
        member.model_version,
        member.block_tokens,
        member.address,
        member.kv_address,
    )


def _told(results: Sequence[SeedResult], reason: str) -> str:
    """Return the sum of `results` for the audit."""
    prefixes = sum(each.prefixes for each in results)
    computed = sum(each.replayed_blocks for each in results)
    failed = sum(each.failed_prefixes for each in results)
    errors = "; ".join(sorted({each.error for each in results if each.error}))
    text = f"{reason}: {prefixes} prefixes, {computed} blocks computed, {failed} prefixes left out"
    return f"{text}; {errors}" if errors else text
