"""Runs attacks on one mesh, one after the other. It observes the mesh before, during and after each, and judges it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc

from tests.abuse import bystanders, memory
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.judge import judge, judge_remains, late_s, p99_s
from tests.abuse.records import Evidence, Row
from tests.abuse.target import FRONT, Target, opened
from tests.chaos import census
from tests.chaos.records import Census
from tests.chaos.truth import Truth
from tests.integration.live_mesh import until

PER_S: Final = 4.0
"""Legitimate calls a second: more than 100 a minute, and far below the capacity of two cores."""

IDLE_DEADLINES: Final = 3
"""Deadlines of a legitimate call until a mesh holds no state: the attacker's calls have ended by then."""

OVERTIME_S: Final = 90.0
"""An attack is ended this long after its planned time, which is a violation."""

SETTLE_POLL_S: Final = 0.1

READY_S_MAX: Final = 60.0
"""Time in which all processes find the control plane. The first census counts their streams."""


class Runner:
    """A mesh, its legitimate clients, and the verdict on each attack. Made by `running`."""

    def __init__(self, target: Target, clients: bystanders.Bystanders) -> None:
        self._target = target
        self._deadline_s = deadline_of(target.is_short)
        self._clients = clients
        config = target.mesh.config
        self._truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
        self.is_whole = True
        """False once the mesh did not withstand an attack: the next attack needs a new mesh."""

    async def run(self, attack: Attack) -> Row:
        """Run `attack` in the form of the mesh and return its row. Misbehaviour of the mesh never raises."""
        dose = attack.short if self._target.is_short and attack.short else attack.long
        self._clients.pause()
        await self._settled(IDLE_DEADLINES * self._deadline_s)
        before = await self._census()
        pids = self._pids()
        memory.reset_peaks(pids)
        start_mb, logs = memory.now_mb(pids), self._log_sizes()
        self._clients.resume()
        began_s = time.monotonic()
        outcome = await self._attacked(attack, dose)
        ended_s = time.monotonic()
        await self._answered_since(ended_s)
        self._clients.pause()
        still_held = await self._settled(IDLE_DEADLINES * self._deadline_s)
        after_mb = await self._memory_back(pids, start_mb, attack.bounds.after_mb, attack.bounds.settle_s)
        after = await self._census_back(attack.bounds, before, ended_s + attack.bounds.settle_s)
        settled_s = time.monotonic() - ended_s
        calls = self._clients.between(began_s, ended_s)
        evidence = Evidence(
            outcome=outcome,
            calls=calls,
            truth=self._truth.of([bystanders.stream_of(call.number) for call in calls]),
            before=before,
            after=after,
            start_mb=start_mb,
            peak_mb=memory.peaks_mb(pids),
            after_mb=after_mb,
            tracebacks=self._tracebacks(logs),
            still_held=still_held,
        )
        violations = judge(attack.bounds, evidence, is_short=self._target.is_short)
        self.is_whole = not violations
        return _row(attack, evidence, ended_s - began_s, settled_s, violations)

    async def _attacked(self, attack: Attack, dose: Dose) -> Outcome:
        try:
            async with asyncio.timeout(dose.seconds + OVERTIME_S):
                return await attack.run(self._target, dose)
        except TimeoutError:
            return Outcome(violations=[f"the attack was still under way {OVERTIME_S:g} s after its time"])
        except (AssertionError, OSError, EOFError, census.Unreachable, grpc.aio.AioRpcError) as error:
            return Outcome(
                violations=[f"the attack could not be carried out: {type(error).__name__}: {error}"]
            )

    async def _answered_since(self, moment_s: float) -> None:
        """Wait until a legitimate call sent after `moment_s` has ended. Nearly all earlier calls have ended then too."""
        deadline_s = time.monotonic() + self._deadline_s + 5
        while time.monotonic() < deadline_s:
            if any(call.sent_s > moment_s for call in self._clients.calls()):
                return
            await asyncio.sleep(SETTLE_POLL_S)

    async def _settled(self, timeout_s: float) -> str:
        """Wait until the mesh holds no state of a request. Return the state that it still holds after `timeout_s`."""
        try:
            await self._target.mesh.idle(timeout_s)
        except AssertionError as error:
            return " ".join(str(error).split())
        except Exception as error:  # noqa: BLE001  # any answer of a broken service
            return f"a status was not answered: {error!r:.200}"
        return ""

    async def _memory_back(
        self, pids: Mapping[str, int], start_mb: Mapping[str, float], more_mb: float, timeout_s: float
    ) -> dict[str, float]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_mb = memory.now_mb(pids)
            if time.monotonic() > deadline_s or all(
                now_mb[name] <= start + more_mb for name, start in start_mb.items()
            ):
                return now_mb
            await asyncio.sleep(SETTLE_POLL_S)

    async def _census_back(self, bounds: Bounds, before: Census, until_s: float) -> Census:
        """Return the census as soon as no state is left behind, or at `until_s`: leases take a while."""
        while True:
            after = await self._census()
            if time.monotonic() > until_s or not list(judge_remains(bounds, before, after)):
                return after
            await asyncio.sleep(SETTLE_POLL_S)

    async def _census(self) -> Census:
        try:
            return await census.take(self._target.rig, time.monotonic())
        except census.Unreachable:
            return Census(time.monotonic(), {}, {}, {}, [])

    def _pids(self) -> dict[str, int]:
        parts = self._target.mesh.parts
        return {name: part.pid for name, part in parts.items() if part.is_running and not part.has_fallen}

    def _log_sizes(self) -> dict[Path, int]:
        logs = [part.log for part in self._target.mesh.parts.values()]
        return {log: log.stat().st_size for log in logs if log.exists()}

    def _tracebacks(self, sizes: Mapping[Path, int]) -> list[str]:
        found = []
        for log, size in sizes.items():
            with log.open("rb") as file:
                file.seek(size)
                lines = file.read().decode(errors="replace").splitlines()
            found += [
                f"{log.stem}: {line}" for line in lines if '"traceback"' in line or "Traceback (" in line
            ]
        return found


def _row(
    attack: Attack, evidence: Evidence, seconds: float, settled_s: float, violations: Sequence[str]
) -> Row:
    services = {
        name: size for name, size in evidence.peak_mb.items() if "engine" not in name and name != "redis"
    }
    grown = {name: evidence.after_mb.get(name, 0.0) - start for name, start in evidence.start_mb.items()}
    peak_part, grown_part = max(services, key=services.__getitem__), max(grown, key=grown.__getitem__)
    answered = [call for call in evidence.calls if call.code == "OK"]
    return Row(
        name=attack.name,
        about=attack.about,
        seconds=round(seconds, 1),
        did=dict(evidence.outcome.did),
        saw=dict(evidence.outcome.saw.most_common()),
        calls=len(evidence.calls),
        answered=len(answered),
        p99_s=p99_s(answered),
        late_s=late_s(evidence),
        peak_part=peak_part,
        peak_mb=round(services[peak_part], 1),
        grown_part=grown_part,
        grown_mb=round(grown[grown_part], 1),
        settled_s=round(settled_s, 1),
        violations=list(violations),
    )


async def run_all(
    attacks: Sequence[Attack],
    folder: Path,
    seed: int,
    *,
    is_short: bool,
    admits_anybody: bool = False,
    edge: str = "",
) -> AsyncGenerator[Row, None]:
    """Run `attacks` on one mesh and yield the row of each. After a failed attack the mesh is replaced."""
    todo = list(attacks)
    meshes = 0
    while todo:
        async with running(
            folder / f"mesh-{meshes}", seed, is_short=is_short, admits_anybody=admits_anybody, edge=edge
        ) as runner:
            while todo and runner.is_whole:
                yield await runner.run(todo.pop(0))
        meshes += 1


def deadline_of(is_short: bool) -> float:
    """Return the deadline of a legitimate call in this form."""
    return bystanders.SHORT_DEADLINE_S if is_short else bystanders.DEADLINE_S


@asynccontextmanager
async def running(
    folder: Path, seed: int, *, is_short: bool, admits_anybody: bool = False, edge: str = ""
) -> AsyncIterator[Runner]:
    """Start a mesh and its legitimate clients, and end them."""
    folder.mkdir(parents=True, exist_ok=True)
    async with (
        opened(folder, seed, is_short=is_short, admits_anybody=admits_anybody, edge=edge) as target,
        bystanders.calling(
            target.address(FRONT), target.key, PER_S, folder, deadline_of(is_short)
        ) as clients,
    ):
        what = "the control plane serves all processes"
        await until(lambda: census.control_serves(target.rig), READY_S_MAX, what, every_s=SETTLE_POLL_S)
        yield Runner(target, clients)
