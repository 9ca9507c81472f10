"""One run of a case: a fresh mesh under load, an unattended rollout, and the record of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from google.protobuf import json_format

from bench import machine
from bench.processes import ANY_CORE, Fleet, Process
from bench.rollouts import conversing, following, turns
from bench.rollouts.cases import BOOT_EVERY_S, BOOTS, DEADLY_SHARE, Case
from bench.rollouts.following import BACK, Follower, Settings
from bench.rollouts.mesh import SALT, RolloutMesh
from bench.rollouts.records import Record
from bench.rollouts.turns import Turn
from kvmesh.snapshot.content import RolloutState

POLL_S: Final = 0.1
SETTLE_S: Final = turns.SILENCE_S + 2.0
"""Time behind the end of a rollout, so that answers that stay away are seen."""
RUN_S_MAX: Final = 1800.0
"""Longest rollout: three steps of 300 s with their rises, and the drain of the canary."""
STALL_S_MAX: Final = 2.0

Say = Callable[[str], None]
Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a run."""

    sessions_per_s: float = 8.0
    warm_s: float = 30.0
    quiet_s: float = 150.0
    """Time without a rollout, before the rollout and behind it, in cases that compare."""
    settings: Settings = field(default_factory=Settings)


class Injection:
    """The fault of a case. `tick` begins it and goes on with it."""

    def __init__(self, case: Case, mesh: RolloutMesh) -> None:
        self.begun_s: float | None = None
        """Unix time."""
        self._case = case
        self._mesh = mesh
        self._kills = 0
        self._next_kill_s = 0.0

    def tick(self, follower: Follower) -> None:
        """Do what is due at the rollout's present state."""
        if self._case.has_deadly_prompts:
            self._mesh.start_fallen_engines()
        if not self._case.is_faulty or follower.state in BACK:
            return
        is_there = follower.latest.weight_percent >= self._case.begin_percent
        if self.begun_s is None and follower.state is RolloutState.BAKING and is_there:
            self.begun_s = time.time()
            self._mesh.fault(self._case.faults)
        if self.begun_s is not None and self._case.kills and self._kills < BOOTS:
            self._kill()

    def _kill(self) -> None:
        if time.time() >= self._next_kill_s:
            self._mesh.kill_and_start(self._case.kills)
            self._kills, self._next_kill_s = self._kills + 1, time.time() + BOOT_EVERY_S


@dataclass(slots=True)
class Observed:
    """Observations of one run."""

    rollout: Window
    quiet: list[Window]
    ended: following.Ending
    begun_s: float | None
    acked_s: float | None
    weight_percent: int
    """Largest weight of the canary since the fault began."""
    busy_percent: float
    report: str = ""
    """The rollout as JSON, with all its changes and verdicts."""


def perform(case: Case, run: int, load: Load, say: Say, evidence: Path) -> Record:
    """Run a case once. Raises BenchError if the mesh does not start, or the client is gone.

    `evidence`: folder that gets the turns, the report of the rollout with all its numbers, and the logs.
    """
    began_s = time.monotonic()
    with Fleet() as fleet:
        say("starts the mesh")
        mesh = RolloutMesh(fleet, is_same_version=case.is_same_version, control=_control(case, evidence))
        client, file = start_client(fleet, mesh, seed=run * 100 + len(case.name)), fleet.folder / TURNS_FILE
        deadly_share = DEADLY_SHARE if case.has_deadly_prompts else 0.0
        client.ask("begin", sessions_per_s=load.sessions_per_s, deadly_share=deadly_share)
        say("warms up")
        time.sleep(load.warm_s)
        seen = _observe(case, mesh, load, say)
        say("ends the load")
        ended = client.ask("end", timeout_s=conversing.DEADLINE_S + 60.0)
        fallen = mesh.fallen(but_engines=case.has_deadly_prompts)  # a late attempt may kill one once more
        problems = [f"{name} ended" for name in fallen]
        if ended["stalled_s"] > STALL_S_MAX:
            problems.append(f"the client stalled for {ended['stalled_s']:.1f} s")
        told = conversing.read(file)
        _keep(fleet.folder, seen, evidence)
    made = Made(run, load.sessions_per_s, time.monotonic() - began_s, tuple(problems))
    return record_of(case, seen, told, made)


def _control(case: Case, evidence: Path) -> tuple[str, ...]:
    """Return the module of the control process, and its own options. A run of A/A is recorded for `redraw`."""
    if not case.is_same_version:
        return ("controlplane",)
    evidence.mkdir(parents=True, exist_ok=True)
    file = (evidence / OBSERVATIONS_FILE).absolute()
    file.unlink(missing_ok=True)
    return ("bench.rollouts.recording_control", "--record", str(file))


def _keep(folder: Path, seen: Observed, evidence: Path) -> None:
    evidence.mkdir(parents=True, exist_ok=True)
    (evidence / "rollout.json").write_text(seen.report, encoding="utf-8")
    for path in (folder / TURNS_FILE, *folder.glob("*.log")):
        if path.stat().st_size:
            shutil.copy(path, evidence)


TURNS_FILE: Final = "turns.jsonl"
OBSERVATIONS_FILE: Final = "observations.jsonl"


def start_client(fleet: Fleet, mesh: RolloutMesh, seed: int) -> Process:
    """Start the client of a mesh. It writes TURNS_FILE."""
    return fleet.start_ready(
        "client",
        "bench.rollouts.conversing",
        ANY_CORE,
        targets=",".join(mesh.frontends),
        salt=SALT,
        file=fleet.folder / TURNS_FILE,
        seed=seed,
    )


def _observe(case: Case, mesh: RolloutMesh, load: Load, say: Say) -> Observed:
    quiet = [_window(load.quiet_s, say)] if case.has_quiet else []
    psutil.cpu_percent()
    follower = Follower(mesh.control, following.start(mesh.config_path, load.settings))
    injection, began_s = Injection(case, mesh), time.time()
    try:
        _follow(follower, injection, say)
        ended_s, busy = time.time(), psutil.cpu_percent()
        time.sleep(SETTLE_S)
    finally:
        follower.close()
    if case.has_quiet:
        quiet.append(_window(load.quiet_s, say))
    begun_s = injection.begun_s
    return Observed(
        (began_s, ended_s),
        quiet,
        follower.ending(),
        begun_s,
        follower.acked_s,
        follower.weight_max(begun_s) if begun_s is not None else 0,
        busy,
        json_format.MessageToJson(follower.latest, indent=1),
    )


def _follow(follower: Follower, injection: Injection, say: Say) -> None:
    """Follow a rollout to its end, at most for RUN_S_MAX."""
    end_s = time.monotonic() + RUN_S_MAX
    while time.monotonic() < end_s:
        follower.poll()
        injection.tick(follower)
        latest = follower.latest
        waits = f"; waits: {latest.waits_for[0]}" if latest.waits_for else ""
        say(f"{follower.state.name} {latest.step}, weight {latest.weight_percent} %{waits}")
        if following.is_final(latest):
            return
        time.sleep(POLL_S)


def _window(seconds: float, say: Say) -> Window:
    """Let the load run without a rollout."""
    say("measures without a rollout")
    began_s = time.time()
    time.sleep(seconds)
    return began_s, time.time()


@dataclass(frozen=True, slots=True)
class Made:
    """How a run was made."""

    run: int
    sessions_per_s: float
    took_s: float
    problems: tuple[str, ...] = ()
    commit: str = field(default_factory=lambda: machine.describe()["commit"])
    cpu: str = field(default_factory=lambda: machine.describe()["cpu"])


def record_of(case: Case, seen: Observed, told: list[Turn], made: Made) -> Record:
    """Return the record of a run. Pure apart from `made`."""
    begun_s, acked_s, problems = seen.begun_s, seen.acked_s, list(made.problems)
    if case.is_faulty and begun_s is None:
        problems.append(f"the fault never began: the canary never had {case.begin_percent} %")
    until_s = acked_s if acked_s is not None else seen.rollout[1]
    hurt = turns.damage(told, begun_s, until_s, seen.weight_percent) if begun_s is not None else NO_DAMAGE
    hung_s = turns.hang_began_s(told, begun_s) if case.is_hang and begun_s is not None else None
    outside_s = begun_s if begun_s is not None else float("inf")
    return Record(
        case=case.name,
        run=made.run,
        commit=made.commit,
        cpu=made.cpu,
        took_s=made.took_s,
        state=seen.ended.state,
        step=seen.ended.step,
        weight_percent=seen.ended.weight_percent,
        gate=seen.ended.gate,
        reason=seen.ended.reason,
        rollout_s=seen.rollout[1] - seen.rollout[0],
        back_s=acked_s - begun_s if acked_s is not None and begun_s is not None else None,
        arrived=hurt.arrived,
        bad=hurt.bad,
        errors=hurt.errors,
        wrong=hurt.wrong,
        silent=hurt.silent,
        bound=hurt.bound,
        hang_s=acked_s - hung_s if acked_s is not None and hung_s is not None else None,
        turns=len(told),
        sessions_per_s=made.sessions_per_s,
        bad_outside=sum(turn.is_bad and turn.ended_s < outside_s for turn in told),
        hit_ratio=turns.hit_ratio(turns.within(told, [seen.rollout, *seen.quiet])),
        ttft_p95_s=turns.ttft_p95_s(turns.within(told, [seen.rollout])),
        quiet_p95_s=turns.ttft_p95_s(turns.within(told, seen.quiet)),
        busy_percent=seen.busy_percent,
        problems=tuple(problems),
    )


NO_DAMAGE: Final = turns.Damage(0, 0, 0, 0, 0, 0.0)
