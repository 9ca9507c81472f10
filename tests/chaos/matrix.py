"""Runs one cell after another on one mesh, and replaces the mesh after a run with violations."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

from tests.chaos import census, rollout
from tests.chaos.cells import FAULT_S, Run
from tests.chaos.clients import PlainReader, Reader, live
from tests.chaos.judge import Limits
from tests.chaos.plan import plan_of, probe_of
from tests.chaos.records import COMPLETE, Census, Record, Violation
from tests.chaos.rig import Rig
from tests.chaos.trial import Trial, readers_of
from tests.chaos.truth import Truth

log = logging.getLogger(__name__)

RUN_S_MAX: Final = 480.0
"""A run that takes longer than the sum of its bounds is broken."""

WARM_REQUESTS: Final = 24
IDLE_S_MAX: Final = 20.0
LAST_LINES: Final = 12
LINE_MAX: Final = 300

OpenRig = Callable[[Path], AbstractAsyncContextManager[Rig]]
"""Starts a mesh with its logs in a folder, and ends it."""

OpenReaders = Callable[[Rig], AbstractAsyncContextManager[tuple[Reader, Reader]]]
"""Makes the readers of a run, and ends them."""


class Matrix:
    """Owns the mesh of the runs, also between two runs."""

    def __init__(
        self,
        open_rig: OpenRig,
        folder: Path,
        commit: str,
        machine: str,
        limits: Limits,
        fault_s: float = FAULT_S,
        open_readers: OpenReaders = readers_of,
    ) -> None:
        """`folder` takes the logs of meshes; those of a mesh without violations are overwritten by the next one's."""
        self._open_readers = open_readers
        self._open_rig = open_rig
        self._folder = folder
        self._commit = commit
        self._machine = machine
        self._limits = limits
        self._fault_s = fault_s
        self._stack = AsyncExitStack()
        self._rig: Rig | None = None
        self._base: Census | None = None

    async def run_all(self, runs: Iterable[Run]) -> AsyncGenerator[Record, None]:
        """Run all of `runs` and yield each record when it is judged. Close the iterator, or the mesh keeps running."""
        try:
            for run in runs:
                yield await self.run(run)
        finally:
            await self.close()

    async def run(self, run: Run) -> Record:
        """Run one cell once. Any failure becomes a violation of the record."""
        began, began_s = dt.datetime.now(dt.UTC), time.monotonic()
        plan = plan_of(run, self._fault_s)
        try:
            async with asyncio.timeout(RUN_S_MAX):
                rig, base = await self._ready()
                config = rig.mesh.config
                truth = await asyncio.to_thread(
                    Truth(config.engine.salt, config.engine.max_sequence_tokens).of, plan.streams
                )
                async with self._open_readers(rig) as readers:
                    trial = Trial(rig, plan, truth, base, self._limits, readers, self._commit)
                    record = (await trial.run()).record
        except Exception as error:
            log.warning("run broke", exc_info=error)
            record = _broken(run, plan.target, self._commit, began, time.monotonic() - began_s, error)
        record.machine = self._machine
        if record.violations:
            await self._abandon(run)
        return record

    async def close(self) -> None:
        """End the mesh, if there is one."""
        self._rig = None
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def _ready(self) -> tuple[Rig, Census]:
        if self._rig is None or self._base is None:
            folder = self._folder / "mesh"
            folder.mkdir(parents=True, exist_ok=True)
            self._rig = await self._stack.enter_async_context(self._open_rig(folder))
            self._base = await settled(self._rig)
        return self._rig, self._base

    async def _abandon(self, run: Run) -> None:
        """Keep the logs of a mesh that broke an invariant, and end it."""
        if self._rig is not None:
            await self._rig.keep_logs(self.logs_of(run))
        await self.close()

    def last_words(self, run: Run, record: Record) -> str:
        """Return the end of the log of every part that a violation of `run` names."""
        told = " ".join(violation.what for violation in record.violations)
        logs = [
            path for path in sorted(self.logs_of(run).glob("*.log")) if re.search(rf"\b{path.stem}\b", told)
        ]
        return "\n".join(f"--- {path.name}\n{_end_of(path)}" for path in logs)

    def logs_of(self, run: Run) -> Path:
        """Return where the logs of a run with violations are."""
        return self._folder / f"{run.cell.part}-{run.cell.fault}-{run.seed}"


async def settled(rig: Rig) -> Census:
    """Start a rollout, send requests until all processes are connected, and return the census of the idle mesh."""
    await rollout.begin(rig)
    plain = PlainReader(lambda number: rig.mesh.parts[f"frontend-{number}"].address)
    run = Run.warm()
    answers = await asyncio.gather(
        *(live(probe_of(run, number, number % 2), plain, time.monotonic) for number in range(WARM_REQUESTS))
    )
    failed = [f"{one.end} {one.code} {one.reason} {one.text}" for one in answers if one.end != COMPLETE]
    assert not failed, f"{len(failed)} of {WARM_REQUESTS} requests failed on a fresh mesh: {failed[0]}"
    await rig.mesh.idle(IDLE_S_MAX)
    return await census.take(rig, 0.0)


def _end_of(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line[:LINE_MAX] for line in lines[-LAST_LINES:])


def _broken(
    run: Run, target: str, commit: str, began: dt.datetime, seconds: float, error: Exception
) -> Record:
    """Return the record of a run that could not be finished."""
    reasons: list[BaseException] = list(error.exceptions) if isinstance(error, ExceptionGroup) else [error]
    if error.__context__ is not None:
        reasons.append(error.__context__)  # the cleanup after a failure often fails, too
    what = "; ".join(f"{type(each).__name__}: {each}" for each in reasons)
    return Record(
        part=run.cell.part,
        fault=run.cell.fault,
        seed=run.seed,
        target=target,
        commit=commit,
        began=began.isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        violations=[Violation("BROKEN", what[:2000])],
    )
