"""A soak: a mesh at 70 % of its capacity, with a fault every 20 s. Memory must stay flat and no stream may be lost."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.tasks import end
from tests.chaos import census, judge, records
from tests.chaos.cells import DOWN_S, FAULT_S, Run, everything
from tests.chaos.cpu import CpuShare, Lateness
from tests.chaos.disturbance import Disturbance
from tests.chaos.judge import Limits
from tests.chaos.load import Load
from tests.chaos.matrix import OpenRig, settled
from tests.chaos.memory import MemoryLog
from tests.chaos.plan import Plan, Stream, peer_of, target_of
from tests.chaos.records import CANCELLED, COMPLETE, Census, Moments, Violation
from tests.chaos.rig import Rig
from tests.chaos.slopes import Sample, slope_of, watch_of
from tests.chaos.soak_record import Death, Hit, SoakRecord
from tests.chaos.trial import CENSUS_EVERY_S, SETTLE_S_MAX, readers_of
from tests.chaos.truth import Truth

EVERY_S: Final = 20.0
LOAD: Final = 0.7

CAPACITY_STREAMS: Final = (32, 64, 96)
"""Concurrencies, tried in turn until a higher one brings no more tokens. At most 96: an engine runs 64 sequences. With
one of two engines unavailable more streams would wait in a queue, and the queue would be measured."""

CAPACITY_S: Final = 15.0
CAPACITY_RAMP_S: Final = 5.0
GAIN_MIN: Final = 1.1

RESTART_S: Final = 1.0
"""Interval between two checks for parts that ended by themselves."""

SHARE: Final = 100
"""Streams in one batch of a process that computes tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Throughput of a mesh without faults."""

    requests_per_s: float
    how: str


class Soak:
    """One soak on a mesh of its own. `tell` is called with a line for each event worth showing."""

    def __init__(
        self, rig: Rig, minutes: float, seed: int, limits: Limits, tell: Callable[[str], None]
    ) -> None:
        self._rig = rig
        self._minutes = minutes
        self._watch = watch_of(minutes)
        self._seed = seed
        self._limits = limits
        self._tell = tell
        self._rng = random.Random(f"{seed} faults")
        self._began_s = time.monotonic()
        self._hits: list[Hit] = []
        self._deaths: list[Death] = []
        self._ending = ""
        """The part that a fault ends at the moment."""
        self._lives: dict[str, str] = {}
        self._violations: list[Violation] = []
        self.samples: dict[str, list[Sample]] = {}
        """Memory samples by process so far."""

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self, commit: str, machine: str) -> SoakRecord:
        """Run the soak and judge it. Raises AssertionError or Unreachable if the mesh cannot be observed any more."""
        began = dt.datetime.now(dt.UTC)
        base = await settled(self._rig)
        self._lives = {name: process.life for name, process in base.processes.items()}
        capacity = await self._capacity()
        self._tell(f"capacity {capacity.requests_per_s:.2f} requests/s ({capacity.how})")
        await self._rig.mesh.idle(SETTLE_S_MAX)
        async with readers_of(self._rig) as (resuming, _):
            load = Load(resuming, self._now_s, random.Random(f"{self._seed} streams"))
            memory = MemoryLog(self._rig, self._now_s)
            self.samples = memory.samples
            sampling = asyncio.create_task(memory.run(), name="memory")
            mending = asyncio.create_task(self._mend(), name="mending")
            cpu, late = CpuShare(), Lateness()
            ticking = asyncio.create_task(late.run(), name="lateness")
            rate, until_s = LOAD * capacity.requests_per_s, self._now_s() + 60 * self._minutes
            try:
                await asyncio.gather(load.at_rate(rate, until_s), self._disturb(until_s))
            finally:
                cpu_share = cpu.share()
                await end([sampling, ticking, mending])
        self._limits = self._limits.behind(late.longest_s)
        await self._settle(base)
        self._tell(f"judging {len(load.streams)} streams")
        await asyncio.to_thread(self._judge, load)
        record = SoakRecord(
            minutes=self._minutes,
            seed=self._seed,
            commit=commit,
            machine=machine,
            began=began.isoformat(timespec="seconds"),
            every_s=EVERY_S,
            load=LOAD,
            capacity_per_s=round(capacity.requests_per_s, 2),
            capacity_how=capacity.how,
            requests_per_s=round(rate, 2),
            cpu_share=round(cpu_share, 2),
            faults=self._hits,
            watch=self._watch,
            slopes=[
                slope_of(name, samples, self._watch) for name, samples in memory.samples.items() if samples
            ],
            violations=self._violations,
            deaths=self._deaths,
        )
        _count(record, load)
        return record

    async def _capacity(self) -> Capacity:
        """Measure the throughput of the mesh without faults."""
        best = Capacity(0.0, "")
        best_tokens = 0.0
        for count in CAPACITY_STREAMS:
            async with readers_of(self._rig) as (resuming, _):
                load = Load(resuming, self._now_s, random.Random(count))
                began_s = self._now_s()
                await load.at_once(count, CAPACITY_S)
            # Cancelled streams are not in `seen`; their tokens count through the mean of those that ended.
            early_s, late_s = began_s + CAPACITY_RAMP_S, began_s + CAPACITY_S
            ended = [one for one in load.seen if early_s <= one.ended_s < late_s]
            tokens = sum(len(one.ids) for one in ended)
            tokens_per_s = tokens / (late_s - early_s)
            self._tell(
                f"{count} at once: {len(ended) / (late_s - early_s):.2f} requests/s, {tokens_per_s:.0f} tokens/s"
            )
            if tokens_per_s < GAIN_MIN * best_tokens:
                break
            best_tokens = tokens_per_s
            per_s = len(ended) / (late_s - early_s)
            best = Capacity(per_s, f"{count} streams at once, {tokens_per_s:.0f} tokens/s")
        return best

    async def _disturb(self, until_s: float) -> None:
        """Break one part after the other until `until_s`."""
        next_s = self._now_s()
        ends_until_s = next_s + self._watch.ends_share * (until_s - next_s)
        while (next_s := max(next_s + EVERY_S, self._now_s())) < until_s - EVERY_S:
            await asyncio.sleep(next_s - self._now_s())
            cells = [cell for cell in everything() if next_s < ends_until_s or not cell.ends_the_part]
            run = Run(self._rng.choice(cells), self._rng.randrange(1, 1_000_000))
            target = target_of(run.cell.part, self._rng.randrange(2))
            away_s = DOWN_S if run.cell.ends_the_part else FAULT_S
            peer = peer_of(run.cell, self._rng.randrange(2))
            self._ending = target if run.cell.ends_the_part else ""
            try:
                moments = await Disturbance(self._rig, run, target, away_s, self._now_s, peer).run()
            except AssertionError as gone:
                self._note(Violation("NOT_BACK", f"{target} after {run.cell}: {gone}"))
                continue
            finally:
                self._ending = ""
            self._lives[target] = (await self._rig.body(target)).life
            served_s = None if moments.served_s is None else moments.served_s - moments.returned_s
            hit = Hit(round(moments.fault_s, 1), str(run.cell), target, served_s and round(served_s, 3))
            self._hits.append(hit)
            if served_s is None:
                self._violations.append(Violation("NOT_READMITTED", f"{target} after {run.cell}"))
            self._tell(f"{hit.at_s:.0f} s: {run.cell} on {target}, back after {served_s or -1:.2f} s")

    async def _mend(self) -> None:
        """Restart each part that ends by itself, as a container's restart policy does, until cancelled.

        The end of a process of the mesh is a violation. The end of a tritonserver, which is not ours, is only reported; its
        effect on the streams is judged as that of every other fault.
        """
        while True:
            await asyncio.sleep(RESTART_S)
            for name, part in self._rig.mesh.parts.items():
                if name == self._ending or not part.is_running or (await self._rig.body(name)).pid:
                    continue
                status = await part.end()
                death = f"{name} with status {status}: {part.tail()[-400:]}"
                self._deaths.append(Death(round(self._now_s(), 1), name, status))
                if name.endswith("-engine"):
                    self._tell(f"ended by itself: {death}")
                else:
                    self._note(Violation("ENDED_BY_ITSELF", death))
                try:
                    await self._rig.mesh.start(name)
                except AssertionError as gone:  # the next round checks and starts it again
                    self._note(Violation("NOT_BACK", f"{name}: {gone}"))
                self._lives[name] = (await self._rig.body(name)).life

    def _note(self, violation: Violation) -> None:
        self._violations.append(violation)
        self._tell(str(violation))

    async def _settle(self, base: Census) -> None:
        """Check that no state is left, compared to the mesh before the first request of the load."""
        processes = {
            name: dataclasses.replace(process, life=self._lives[name], resident_bytes=None)
            for name, process in base.processes.items()
        }
        before = dataclasses.replace(base, processes=processes)
        plan, give_up_s = self._plan(()), self._now_s() + 2 * SETTLE_S_MAX
        while True:
            remains: list[Violation] = []
            with suppress(census.Unreachable):
                after = await census.take(self._rig, self._now_s())
                remains = list(judge.judge_remains(plan, before, after, self._limits))
                if not remains:
                    return
            if self._now_s() > give_up_s:
                self._violations += remains or [Violation("NOT_SERVING", "a part cannot be observed")]
                return
            await asyncio.sleep(CENSUS_EVERY_S)

    def _judge(self, load: Load) -> None:
        config = self._rig.mesh.config.engine
        truth = truth_of(load.streams, config.salt, config.max_sequence_tokens)
        moments = Moments(0.0, 0.0, 0.0, 0.0, 0.0)
        self._violations += judge.judge_streams(
            self._plan(load.streams), truth, load.seen, moments, self._limits
        )

    def _plan(self, streams: Sequence[Stream]) -> Plan:
        """Return a plan that excuses no failure."""
        return Plan(Run.warm(), "", 0.0, 0.0, tuple(streams))


def truth_of(streams: Sequence[Stream], salt: str, max_sequence_tokens: int) -> dict[int, list[int]]:
    """Return the tokens of many streams, computed on all cores; blocks meanwhile."""
    shares = [streams[at : at + SHARE] for at in range(0, len(streams), SHARE)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        known = processes.map(Truth.of, itertools.repeat(Truth(salt, max_sequence_tokens)), shares)
        return {number: tokens for share in known for number, tokens in share.items()}


def _count(record: SoakRecord, load: Load) -> None:
    """Fill in the counts of the streams."""
    streams = {stream.number: stream for stream in load.streams}
    failed = [one for one in load.seen if one.end not in (COMPLETE, CANCELLED)]
    record.streams = len(load.streams)
    record.done = sum(one.end == COMPLETE for one in load.seen)
    record.cancelled = sum(one.end == CANCELLED for one in load.seen)
    record.deadlined = sum(judge.is_deadline(streams[one.number], one) for one in failed)
    record.lost = len(failed) - record.deadlined
    record.takeovers = sum(one.takeovers for one in load.seen)
    record.resumed = sum(one.resumes for one in load.seen)
    record.client_resumes = sum(one.client_resumes for one in load.seen)
    record.recomputed_tokens = sum(one.recomputed_tokens for one in load.seen)
    record.output_tokens = sum(len(one.ids) for one in load.seen)
    record.longest_pause_s = round(records.longest_pause_s(load.seen, Moments(0, 0, 0, 0, 0)), 2)


async def soak(
    open_rig: OpenRig,
    folder: Path,
    minutes: float,
    seed: int,
    limits: Limits,
    commit: str,
    machine: str,
    tell: Callable[[str], None],
) -> SoakRecord:
    """Start a mesh with its logs in `folder`, soak it, and keep its logs if an invariant was violated."""
    folder.mkdir(parents=True, exist_ok=True)
    async with open_rig(folder) as rig:
        soaking = Soak(rig, minutes, seed, limits, tell)
        try:
            record = await soaking.run(commit, machine)
        finally:
            (folder / "memory.json").write_bytes(msgspec.json.encode(soaking.samples))
        if record.violations:
            await rig.keep_logs(folder / "kept")
    return record
