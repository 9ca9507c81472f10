"""Seeding between regions at one control process: what it learns, when it replays, and what it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from controlplane import region_seeding
from controlplane.actions import AppendEvent
from controlplane.loop import ControlLoop
from controlplane.region_control import SEEDED_TOLD_S
from controlplane.region_seeding import AGAIN_S, BLOCKS_MAX, TIME_SHARE, RegionSeeding
from controlplane.warmup.hot_record import HotPrefix, HotQuestion, HotRecord
from controlplane.warmup.jobs import Job, Result, SeedJob, SeedResult
from kvmesh.clock import VirtualClock
from kvmesh.control.v1 import region_pb2
from kvmesh.regions.quantity import Quantity
from tests.unit.controlplane.test_region_control import CONTENT, Cell, news, signals
from tests.unit.controlplane.warmup.replicas import until

PREFIXES = tuple(bytes([at, 0, 0, 0]) * 32 for at in range(1, 6))
"""Five prefixes of one block each, the heaviest first."""


class Bench:
    """The leader of region "eu", which grants region "us" a part of its headroom."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1_000_000.0)
        self.cell = Cell()
        self.events: list[AppendEvent] = []
        self.asked: list[HotQuestion] = []
        self.jobs: list[SeedJob] = []
        self.result = SeedResult(prefixes=5, replayed_blocks=5)
        self.sequence = 0
        core = SimpleNamespace(leads=True, registry=self.cell.registry, content=CONTENT)
        store = SimpleNamespace(append=self.events.append)
        loop = SimpleNamespace(core=core, store=store, touch=lambda: None)
        self.seeding = RegionSeeding(
            cast(ControlLoop, loop), self.cell.control, self.ask, self.run, self.clock
        )
        quantity = region_pb2.Quantity
        self.cell.report(
            region_pb2.RouterLoad(
                own=quantity(tokens_per_s=100, blocks=10), capacity=quantity(tokens_per_s=1000, blocks=1000)
            )
        )

    async def ask(self, question: HotQuestion) -> HotRecord:
        """Answer as the routers of the other region."""
        self.asked.append(question)
        return HotRecord(tuple(HotPrefix(each, 1.0, 1, {}) for each in PREFIXES))

    async def run(self, job: Job) -> Result:
        """Run a job of a warm-up."""
        assert isinstance(job, SeedJob)
        self.jobs.append(job)
        return self.result

    def hear(self, **fields: object) -> None:
        """Take news of the other region."""
        self.sequence += 1
        given: dict[str, object] = {"stable_version": "m", "stable_pool": "default", **fields}
        self.cell.control.on_news(news(self.sequence, signals=signals(load=300), **given), self.cell.now_s)

    def step(self, seconds: int) -> None:
        """Let time pass at both clocks."""
        self.cell.step(seconds)
        self.clock.advance(self.cell.now_s - self.clock.now_s())


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """The leader, with its task. It looks at each turn of the event loop, so that the virtual clock decides alone."""
    monkeypatch.setattr(region_seeding, "LOOK_S", 0.0)
    made = Bench()
    (background,) = [each for _, each in made.seeding.background()]
    task = asyncio.create_task(background)
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    """Give the task some turns of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_wish_of_another_region_replays_its_hot_prompts_once(bench: Bench) -> None:
    """They are replayed within its grant, and the source is told for a minute."""
    bench.hear()
    bench.step(4)
    await until(lambda: bench.asked)
    await settle()
    assert bench.asked[0].routers == (("router-0", "10.1.0.1:7000"),) and not bench.jobs
    bench.hear(seed_wishes=("eu",))
    await until(lambda: bench.events)
    (job,) = bench.jobs
    granted = bench.cell.control.regions.grants()["us"]
    assert job.is_replay and job.package_prefixes == PREFIXES and job.time_share == TIME_SHARE
    assert job.blocks_max == min(BLOCKS_MAX, int(granted.blocks)) > 0 and job.target.process_id == "prefill-0"
    (event,) = bench.events
    assert (event.what, event.target) == ("region.seeded", "us") and "5 prefixes" in event.result
    bench.step(2)
    assert bench.cell.control.news(1, bench.cell.now_s).seeded_from == ("us",)
    bench.step(int(SEEDED_TOLD_S))
    await settle()
    assert not bench.cell.control.news(1, bench.cell.now_s).seeded_from
    assert len(bench.jobs) == 1, "the wish is as old as its news"


async def test_a_wish_that_lasts_is_granted_again_after_a_pause(bench: Bench) -> None:
    """The callers move for longer than a replay takes: what is hot has changed by then."""
    bench.hear()
    bench.step(4)
    for _ in range(int(AGAIN_S) + 5):
        bench.hear(seed_wishes=("eu",))
        bench.step(1)
        await settle()
    assert len(bench.jobs) == 2


@pytest.mark.parametrize(
    "result",
    [SeedResult(failed_prefixes=5), SeedResult(prefixes=1, error="prefill-0: cannot be reached")],
)
async def test_a_failed_replay_is_not_told_as_done(bench: Bench, result: SeedResult) -> None:
    """The source waits for its end, or for the longest time."""
    bench.result = result
    bench.hear(seed_wishes=("eu",))
    bench.step(4)
    await until(lambda: bench.events)
    bench.step(2)
    assert result.error in bench.events[0].result
    assert not bench.cell.control.news(1, bench.cell.now_s).seeded_from


async def test_nothing_is_replayed_without_a_grant(bench: Bench) -> None:
    """A full region has no room for the callers of another one, and none for their prompts."""
    quantity = region_pb2.Quantity
    bench.cell.report(
        region_pb2.RouterLoad(
            own=quantity(tokens_per_s=1000, blocks=1000), capacity=quantity(tokens_per_s=1000, blocks=1000)
        )
    )
    bench.hear(seed_wishes=("eu",))
    bench.step(10)
    await settle()
    assert bench.cell.control.regions.grants()["us"] == Quantity(0, 0) and not bench.jobs
