"""One run: streams, the fault in their middle, the return of the part, and what is left when all have ended."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from kvmesh.client import Client
from tests.chaos import census, faults, judge, records
from tests.chaos.clients import PlainReader, Reader, ResumingReader, live
from tests.chaos.cpu import CpuShare
from tests.chaos.judge import Limits
from tests.chaos.plan import AFTER, BEFORE, DURING, Plan, Stream, probe_of
from tests.chaos.records import CANCELLED, COMPLETE, Census, Moments, Record, Seen, Violation
from tests.chaos.rig import Rig
from tests.integration.live_mesh import until

RETURN_S_MAX: Final = 60.0
"""A part that does not answer health this long after its fault is over does not come back."""

SERVED_S_MAX: Final = 15.0
"""A part that serves no request this long after its return is not used any more."""

SETTLE_S_MAX: Final = 15.0
"""What a run held is back this long after its last stream, orphan times and lost handoffs included."""

LOOK_EVERY_S: Final = 0.05

PROBES: Final = 4
"""Requests that look for the returned part, at once: idle replicas are chosen by load."""


@dataclasses.dataclass(slots=True)
class Result:
    """A run and whatever a reader of a violation needs."""

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

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def run(self) -> Result:
        """Do it all. Raises AssertionError or Unreachable where the mesh cannot be looked at any more."""
        began = dt.datetime.now(dt.UTC)
        self._began_s = time.monotonic()
        before = self._against_base(await census.take(self._rig, self._now_s()))
        cpu = CpuShare()
        async with asyncio.TaskGroup() as group:
            early = self._send(group, BEFORE)
            await asyncio.sleep(max((stream.offset_s for stream in early), default=0.0) + self._plan.delay_s)
            moments = await self._disturb(group)
        cpu_share = cpu.share()
        after, violations = await self._settle(before, moments)
        del after
        return Result(self._record(began, moments, violations, cpu_share), self._seen, moments)

    def _send(self, group: asyncio.TaskGroup, phase: str) -> list[Stream]:
        """Start the clients of `phase`, each at its moment from now on."""
        streams = [stream for stream in self._plan.streams if stream.phase == phase]
        for stream in streams:
            group.create_task(self._client(stream), name=f"stream-{stream.number}")
        return streams

    async def _client(self, stream: Stream) -> None:
        await asyncio.sleep(stream.offset_s)
        reader = self._plain if stream.is_plain else self._resuming
        self._seen.append(await live(stream, reader, self._now_s))

    async def _disturb(self, group: asyncio.TaskGroup) -> Moments:
        """Hit the part, bring it back, and see it serve."""
        plan, target = self._plan, self._plan.target
        fault = plan.run.cell.fault
        fault_s = self._now_s()
        self._send(group, DURING)
        await faults.apply(self._rig.faults, fault, target)
        gone_s = self._now_s() if plan.run.cell.ends_the_part else fault_s
        await asyncio.sleep(max(0.0, gone_s + plan.away_s - self._now_s()))
        mended_s = self._now_s()
        await faults.undo(self._rig.faults, fault, target)
        await until(self._is_back, RETURN_S_MAX, f"{target} answers health again", every_s=LOOK_EVERY_S)
        returned_s = self._now_s()
        self._send(group, AFTER)
        served_s = await self._first_served()
        return Moments(fault_s, gone_s, mended_s, returned_s, served_s)

    async def _is_back(self) -> bool:
        return await census.is_serving(self._rig, self._plan.target)

    async def _first_served(self) -> float | None:
        """Return when the returned part served a request, None if it did not in time."""
        if self._plan.target == "redis":
            return await self._redis_used()
        number = 1000
        probes: set[asyncio.Task[Seen]] = set()
        give_up_s = self._now_s() + SERVED_S_MAX
        try:
            while self._now_s() < give_up_s:
                while len(probes) < PROBES:
                    number += 1
                    stream = probe_of(self._plan.run, number, self._probed_frontend(number))
                    probes.add(asyncio.create_task(live(stream, self._plain, self._now_s)))
                done, probes = await asyncio.wait(
                    probes, timeout=give_up_s - self._now_s(), return_when=asyncio.FIRST_COMPLETED
                )
                hits = [task.result() for task in done if self._is_served(task.result())]
                if hits:
                    return min(one.came_s[1] for one in hits)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for task in probes:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*probes, return_exceptions=True)
        return None

    def _probed_frontend(self, number: int) -> int:
        """Probes go to the returned frontend, or to both in turn."""
        name, _, replica = self._plan.target.rpartition("-")
        return int(replica) if name == "frontend" else number % 2

    def _is_served(self, one: Seen) -> bool:
        part = self._plan.target.removesuffix("-engine")
        return one.end == COMPLETE and part in one.parts

    async def _redis_used(self) -> float | None:
        """Return when every router and replica was registered and connected again."""
        with suppress(AssertionError):
            await until(self._is_redis_used, SERVED_S_MAX, "Redis is used again", every_s=LOOK_EVERY_S)
            return self._now_s()
        return None

    async def _is_redis_used(self) -> bool:
        for name in self._rig.mesh.running("router"):
            if not (await self._rig.mesh.status(name)).redis_connected:
                return False
        everybody = set(self._rig.mesh.running("frontend", "router", "prefill", "decode"))
        return await census.registered(self._rig, self._rig.mesh.config.mesh.name) == everybody

    async def _settle(self, before: Census, moments: Moments) -> tuple[Census, list[Violation]]:
        """Look at the mesh until nothing of the run is left, and judge all of it."""
        give_up_s = self._now_s() + SETTLE_S_MAX
        while True:
            after = await census.take(self._rig, self._now_s())
            remains = list(judge.judge_remains(self._plan, before, after, self._limits))
            if not remains or self._now_s() > give_up_s:
                break
            await asyncio.sleep(0.2)
        violations = [
            *judge.judge_streams(self._plan, self._truth, self._seen, moments, self._limits),
            *remains,
            *judge.judge_return(self._plan, moments),
        ]
        return after, violations

    def _against_base(self, now: Census) -> Census:
        """Return the census to compare with: lives and counts of now, resources of the fresh mesh."""
        processes = {
            name: dataclasses.replace(self._base.processes[name], life=process.life)
            for name, process in now.processes.items()
        }
        return dataclasses.replace(now, processes=processes)

    def _record(
        self, began: dt.datetime, moments: Moments, violations: Sequence[Violation], cpu_share: float
    ) -> Record:
        plan, seen = self._plan, self._seen
        streams = {stream.number: stream for stream in plan.streams}
        failed = [one for one in seen if one.end not in (COMPLETE, CANCELLED)]
        deadlined = [one for one in failed if judge.is_deadline(streams[one.number], one)]
        excused = [
            one
            for one in failed
            if one not in deadlined and judge.is_excused(plan, streams[one.number], one, moments)
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
            adopted=sum(one.adoptions for one in seen),
            resumed=sum(one.resumes for one in seen),
            client_resumes=sum(one.client_resumes for one in seen),
            recomputed_tokens=sum(one.recomputed_tokens for one in seen),
            output_tokens=sum(len(one.ids) for one in seen),
            longest_pause_s=round(records.longest_pause_s(seen, moments), 3),
            first_served_s=(
                None if moments.served_s is None else round(moments.served_s - moments.returned_s, 3)
            ),
            cpu_share=round(cpu_share, 2),
            violations=list(violations),
        )


@asynccontextmanager
async def readers_of(rig: Rig) -> AsyncIterator[tuple[Reader, Reader]]:
    """Yield a resuming client's reader and a plain one's."""
    addresses = [part.address for name, part in rig.mesh.parts.items() if name.startswith("frontend")]
    async with Client(addresses) as client:
        yield ResumingReader(client), PlainReader(addresses.__getitem__)
