"""One run: streams, a fault during them, the return of the part, and the state left when all have ended."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from msgspec import UNSET, UnsetType

from kvmesh.client import Client
from kvmesh.tasks import end
from tests.chaos import census, judge, records
from tests.chaos.charges import judge_charges
from tests.chaos.clients import PlainReader, Reader, ResumingReader, live
from tests.chaos.cpu import CpuShare, Lateness
from tests.chaos.disturbance import Disturbance
from tests.chaos.held_watch import HeldWatch
from tests.chaos.judge import Limits
from tests.chaos.plan import AFTER, ARRIVE_S, BEFORE, DURING, Plan, Stream, replica_of
from tests.chaos.records import CANCELLED, COMPLETE, Census, ColdReturn, Moments, Record, Seen, Violation
from tests.chaos.rig import Rig

SETTLE_S_MAX: Final = 25.0
"""Longest time from the last stream of a run until its state is released: detached streams and lost handoffs included."""

CENSUS_EVERY_S: Final = 0.2
"""Interval between two censuses, each of which queries every process."""


@dataclasses.dataclass(slots=True)
class Result:
    """A run, with the data that explains its violations."""

    record: Record
    seen: list[Seen]
    moments: Moments


class Trial:
    """Runs one plan against a rig. `base` is the census of the idle mesh after its first request, `truth` the tokens."""

    def __init__(
        self,
        rig: Rig,
        plan: Plan,
        truth: dict[int, list[int]],
        base: Census,
        limits: Limits,
        readers: tuple[Reader, Reader],
        commit: str,
    ) -> None:
        """`readers`: a resuming client's and a plain one's."""
        self._rig = rig
        self._plan = plan
        self._truth = truth
        self._base = base
        self._limits = limits
        self._resuming, self._plain = readers
        self._commit = commit
        self._began_s = 0.0
        self._seen: list[Seen] = []
        self._watch = HeldWatch(rig, replica_of(plan.target), self._now_s) if rig.is_cold else None

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> Result:
        """Carry the run out. Raises AssertionError or Unreachable if the mesh cannot be observed any more."""
        began = dt.datetime.now(dt.UTC)
        self._began_s = time.monotonic()
        before = self._against_base(await census.take(self._rig, self._now_s()))
        cpu, late = CpuShare(), Lateness()
        tasks = [asyncio.create_task(late.run(), name="lateness")]
        if self._watch is not None:
            tasks.append(asyncio.create_task(self._watch.run(), name="held watch"))
        try:
            async with asyncio.TaskGroup() as group:
                self._send(group, BEFORE)
                await asyncio.sleep(ARRIVE_S + self._plan.delay_s)
                disturbance = Disturbance(
                    self._rig,
                    self._plan.run,
                    self._plan.target,
                    self._plan.away_s,
                    self._now_s,
                    self._plan.peer,
                    self._watch,
                )
                moments = await disturbance.run(
                    lambda: self._send(group, DURING), lambda: self._send(group, AFTER)
                )
            cpu_share = cpu.share()
            for task in tasks:
                assert not task.done(), f"{task.get_name()} ended early: {task.exception()}"
        finally:
            await end(tasks)
        self._limits = self._limits.behind(late.longest_s)
        violations = await self._settle(before, moments, disturbance.probes)
        cold: ColdReturn | UnsetType = UNSET
        if self._watch is not None:
            cold = self._watch.told(moments.mended_s, moments.returned_s)
            violations += judge.judge_cold(self._plan, cold, moments, self._limits)
        record = self._record(began, moments, violations)
        record.cold = cold
        record.cpu_share, record.runner_late_s = round(cpu_share, 2), round(late.longest_s, 3)
        return Result(record, self._seen, moments)

    def _send(self, group: asyncio.TaskGroup, phase: str) -> None:
        """Start the clients of `phase`, each at its offset from now."""
        for stream in self._plan.streams:
            if stream.phase == phase:
                group.create_task(self._client(stream), name=f"stream-{stream.number}")

    async def _client(self, stream: Stream) -> None:
        await asyncio.sleep(stream.offset_s)
        reader = self._plain if stream.is_plain else self._resuming
        self._seen.append(await live(stream, reader, self._now_s))

    async def _settle(
        self, before: Census, moments: Moments, probes: Sequence[tuple[Stream, Seen | None]]
    ) -> list[Violation]:
        """Observe the mesh until no state of the run is left, and judge all of it."""
        give_up_s = self._now_s() + SETTLE_S_MAX
        while True:
            after = await census.take(self._rig, self._now_s())
            remains = [
                *judge.judge_remains(self._plan, before, after, self._limits),
                *judge_charges(self._plan, self._truth, self._seen, probes, before, after),
            ]
            if not remains or self._now_s() > give_up_s:
                break
            await asyncio.sleep(CENSUS_EVERY_S)
        return [
            *judge.judge_streams(self._plan, self._truth, self._seen, moments, self._limits),
            *remains,
            *judge.judge_return(self._plan, moments, self._limits),
        ]

    def _against_base(self, now: Census) -> Census:
        """Return the census for the comparison: lives and counts of `now`, resources of the fresh mesh."""
        processes = {
            name: dataclasses.replace(self._base.processes[name], life=process.life)
            for name, process in now.processes.items()
        }
        return dataclasses.replace(now, processes=processes)

    def _record(self, began: dt.datetime, moments: Moments, violations: Sequence[Violation]) -> Record:
        plan, seen = self._plan, self._seen
        streams = {stream.number: stream for stream in plan.streams}
        failed = [one for one in seen if one.end not in (COMPLETE, CANCELLED)]
        deadlined = [one for one in failed if judge.is_deadline(streams[one.number], one)]
        excused = [
            one
            for one in failed
            if one not in deadlined
            and judge.is_excused(plan, streams[one.number], one, moments, self._limits)
        ]
        return Record(
            part=plan.run.cell.part,
            fault=plan.run.cell.fault,
            seed=plan.run.seed,
            target=plan.target,
            commit=self._commit,
            began=began.isoformat(timespec="seconds"),
            seconds=round(self._now_s(), 1),
            streams=len(plan.streams),
            in_flight=sum(one.was_live(moments.fault_s) for one in seen),
            done=sum(one.end == COMPLETE for one in seen),
            cancelled=sum(one.end == CANCELLED for one in seen),
            deadlined=len(deadlined),
            excused=len(excused),
            lost=len(failed) - len(deadlined) - len(excused),
            takeovers=sum(one.takeovers for one in seen),
            resumed=sum(one.resumes for one in seen),
            client_resumes=sum(one.client_resumes for one in seen),
            recomputed_tokens=sum(one.recomputed_tokens for one in seen),
            output_tokens=sum(len(one.ids) for one in seen),
            longest_pause_s=round(records.longest_pause_s(seen, moments), 3),
            first_served_s=(
                None if moments.served_s is None else round(moments.served_s - moments.returned_s, 3)
            ),
            means=moments.means,
            violations=list(violations),
        )


@asynccontextmanager
async def readers_of(rig: Rig) -> AsyncIterator[tuple[Reader, Reader]]:
    """Yield a resuming client's reader and a plain one's."""
    addresses = [part.address for name, part in rig.mesh.parts.items() if name.startswith("frontend")]
    async with Client(addresses) as client:
        yield ResumingReader(client), PlainReader(addresses.__getitem__)
