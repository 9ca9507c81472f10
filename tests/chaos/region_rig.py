"""Faults in regions under load: two regions of 1 + 1 in containers, and clients that know both."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import random
import shutil
import time
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, Final

from tests.chaos import machine
from tests.chaos.cells import Run
from tests.chaos.cpu import CpuShare, Lateness
from tests.chaos.records import Violation
from tests.chaos.region_record import RegionRecord, figures, judge
from tests.gameday import acts, drawing
from tests.gameday.clients import Clients, play_of
from tests.gameday.conversations import Conversation, Demand
from tests.gameday.day import GameDay, new_day
from tests.gameday.shapes import EQUAL, REGIONS, VERSION

log = logging.getLogger(__name__)

PAIR: Final = REGIONS[:2]
CONVERSATIONS_PER_S: Final = 0.5
"""At each region: some three turns per second, a third of its capacity."""

WARM_S: Final = 8.0
DELAY_S: Final = (0.2, 1.5)
FAULT_S: Final = 12.0
AFTER_S: Final = 6.0
LOAD_S_MAX: Final = 120.0
RUN_S_MAX: Final = 480.0
IDLE_S_MAX: Final = 30.0

ACTS: Final[dict[str, tuple[acts.Act, acts.Act]]] = {
    "region:kill": (acts.kill, acts.restart),
    "region:cut": (acts.isolate, acts.heal_link),
    "link:slow": (acts.slow_link, acts.heal_link),
    "region-redis:kill": (acts.kill_redis, acts.restart),
}
"""Cell -> its fault, and the removal of it."""


class RegionMatrix:
    """Runs cells, one after the other, on regions that it starts when needed. Violations end them."""

    def __init__(self, folder: Path, tag: str) -> None:
        """`folder` takes the logs."""
        self._folder = folder
        self._tag = tag
        self._day: GameDay | None = None
        self._clients: Clients | None = None

    async def run_all(self, runs: Iterable[Run]) -> AsyncGenerator[RegionRecord, None]:
        """Run all of `runs` and yield each record when it is judged. Close the iterator, or the regions keep running."""
        try:
            for run in runs:
                yield await self.run(run)
        finally:
            await self.close()

    async def run(self, run: Run) -> RegionRecord:
        """Run one cell once. Any failure becomes a violation of the record."""
        began, began_s = dt.datetime.now(dt.UTC), time.monotonic()
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(RUN_S_MAX):
                found = await self._trial(run)
        except Exception as error:
            log.warning("run broke", exc_info=error)
            found = {"violations": (Violation("BROKEN", f"{type(error).__name__}: {error}"[:2000]),)}
        if found["violations"]:
            await self.close()
            shutil.copytree(self._folder / "regions", self.logs_of(run), dirs_exist_ok=True)
        return RegionRecord(
            part=run.cell.part,
            fault=run.cell.fault,
            seed=run.seed,
            commit=machine.commit(),
            machine=machine.about(),
            began=began.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - began_s, 1),
            **found,
        )

    def logs_of(self, run: Run) -> Path:
        """Return where the logs of a run with violations are."""
        return self._folder / f"{run.cell.part}-{run.cell.fault}-{run.seed}"

    async def close(self) -> None:
        """End the regions, if they run."""
        day, self._day, self._clients = self._day, None, None
        if day is not None:
            await asyncio.shield(day.mesh.stop())

    async def _ready(self) -> tuple[GameDay, Clients]:
        if self._day is None or self._clients is None:
            await self.close()
            folder = self._folder / "regions"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._day = new_day(EQUAL, PAIR, folder, self._tag)
            await self._day.mesh.start()
            await self._day.federated()
            await self._day.seen_well(*self._day.mesh.regions)
            self._clients = Clients(await self._day.mesh.station(), folder / "stations")
        return self._day, self._clients

    async def _trial(self, run: Run) -> dict[str, Any]:
        """Return the fields of the record."""
        conversations = await asyncio.to_thread(conversations_of, run)
        day, clients = await self._ready()
        strike, heal = ACTS[str(run.cell)]
        lateness = Lateness()
        watching = asyncio.create_task(lateness.run())
        try:
            begin_s = time.monotonic() + 1.0
            await clients.start(play_of(day, begin_s, conversations), RUN_S_MAX)
            await clients.until(begin_s + WARM_S + random.Random(f"{run}").uniform(*DELAY_S))
            cpu, struck_s = CpuShare(), time.monotonic()
            await strike(day)
            await clients.until(struck_s + FAULT_S)
            healed_s = time.monotonic()
            await heal(day)
            await clients.until(time.monotonic() + AFTER_S)
            share = cpu.share()
            found = await clients.stop()
        finally:
            watching.cancel()
        violations = [*judge(found), *await _left_behind(day)]
        return {
            **figures(found, day.target, struck_s, healed_s),
            "cpu_share": round(share, 3),
            "late_s": round(max(lateness.longest_s, clients.late_s), 3),
            "violations": tuple(violations),
        }


def conversations_of(run: Run, count: int | None = None) -> list[Conversation]:
    """Draw the conversations of a run, the first `count` of them. None: all. The same run has the same ones."""
    seed = f"{run.cell} {run.seed}"
    truths = drawing.truths_of([VERSION])
    demands = [Demand(name, CONVERSATIONS_PER_S) for name in PAIR]
    found = drawing.arrivals(demands, LOAD_S_MAX, random.Random(seed))
    return [
        drawing.conversation(number, at_s, home, [VERSION], truths, seed)
        for number, (at_s, home) in enumerate(found[:count])
    ]


async def _left_behind(day: GameDay) -> list[Violation]:
    """Return what is not as it was before the fault."""
    made = []
    for region, mesh in day.mesh.regions.items():
        fallen = await mesh.fallen()
        made += [
            Violation("FALLEN", f"{region}/{name} ended with {status}") for name, status in fallen.items()
        ]
        try:
            await mesh.placeable()
            await mesh.idle(IDLE_S_MAX)
        except AssertionError as error:
            made.append(Violation("HELD", f"{region}: {error}"[:500]))
    return made
