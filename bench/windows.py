"""One measured window: CPU of the process under test and what its neighbours counted, over the same seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from bench import accounting, aims
from bench.processes import Process
from bench.results import Results


@dataclass(frozen=True, slots=True)
class Case:
    """Streams that each get a token every `step_ms`, from `replicas` sources."""

    streams: int
    step_ms: float
    replicas: int = 1

    def __str__(self) -> str:
        text = f"{self.streams} stream{'s' * (self.streams > 1)}, {self.step_ms:g} ms"
        return text if self.replicas == 1 else f"{text}, {self.replicas} replicas"


CASES = (
    Case(256, 50),
    Case(1, 20),
    Case(16, 20),
    Case(64, 20),
    Case(128, 20),
    Case(16, 10),
)
"""The largest first: memory per stream is the growth of a process that had only a few streams before."""
QUICK_CASES = (Case(256, 50), Case(1, 20), Case(64, 20))


LATE_SHARE_MAX = 0.1
"""Steps of a source that may begin a quarter of a step late; with more, frames pile up and look cheap."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take."""

    repeats: int
    warm_s: float
    window_s: float
    rate_s: float
    is_quick: bool
    is_full: bool

    @property
    def cases(self) -> tuple[Case, ...]:
        """Cases with one replica."""
        return QUICK_CASES if self.is_quick else CASES

    @property
    def double_cases(self) -> tuple[Case, ...]:
        """Cases with two replicas."""
        return (Case(64, 20, 2),) if self.is_quick else (Case(16, 20, 2), Case(64, 20, 2), Case(128, 20, 2))


QUICK = Pace(repeats=1, warm_s=0.7, window_s=2.0, rate_s=2.5, is_quick=True, is_full=False)
NORMAL = Pace(repeats=3, warm_s=0.7, window_s=2.2, rate_s=3.0, is_quick=False, is_full=False)
FULL = Pace(repeats=3, warm_s=0.7, window_s=2.2, rate_s=3.0, is_quick=False, is_full=True)


def with_repeats(pace: Pace, repeats: int) -> Pace:
    """Return `pace` with another number of repeats; 0 leaves it."""
    return replace(pace, repeats=repeats) if repeats else pace


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two moments."""

    seconds: float
    cpu_s: float
    counts: dict[str, float]
    """Growth of the load's counters."""


def measure(pids: list[int], load: Process, seconds: float) -> Window:
    """Watch `pids` for `seconds`. The load was started and warmed up before."""
    before, first = accounting.usage(*pids), load.ask("counters")
    time.sleep(seconds)
    after, last = accounting.usage(*pids), load.ask("counters")
    return Window(
        (after.at_ns - before.at_ns) / 1e9, (after.cpu_ns - before.cpu_ns) / 1e9, _growth(first, last)
    )


def add_stream_figures(
    results: Results,
    scenario: str,
    case: Case,
    window: Window,
    frames_in: float | None = None,
    *,
    way: str = "",
) -> None:
    """Add what a window of open streams shows.

    `frames_in`: frames, where the load sees no frames but messages. `way`: how it was done, where there are several.
    """
    name = f"{case}, {way}" if way else str(case)
    tokens = window.counts["tokens"]
    frames = window.counts["frames"] if frames_in is None else frames_in
    rows = window.counts["rows"]
    if not tokens or not frames:
        results.problem(scenario, "no token arrived in the window", name)
        return
    expected = case.streams / case.step_ms * 1000 * window.seconds
    if tokens < 0.97 * expected:
        results.problem(scenario, f"{tokens / expected:.0%} of the paced tokens arrived", name)
    results.add(scenario, name, aims.PER_TOKEN, "us", window.cpu_s / tokens * 1e6)
    results.add(scenario, name, aims.PER_FRAME, "us", window.cpu_s / frames * 1e6)
    results.add(scenario, name, aims.ROWS, "rows", rows / frames)


def add_rate_figures(results: Results, scenario: str, case: str, window: Window, per_s: float) -> None:
    """Add what a window of short requests at a rate shows."""
    finished = window.counts["finished"]
    if finished < 0.85 * per_s * window.seconds:
        results.problem(
            scenario, f"{finished / window.seconds:.0f} of {per_s:g} requests/s were finished", case
        )
    if finished:
        results.add(scenario, case, aims.PER_REQUEST, "ms", window.cpu_s / finished * 1e3)
        results.add(scenario, case, "share of the core", "%", window.cpu_s / window.seconds * 100)


def frames_since(source: Process, earlier: dict[str, Any]) -> float:
    """Return the frames `source` sent since `earlier`."""
    return _growth(earlier, source.ask("counters"))["frames"]


def check_source(
    results: Results, scenario: str, case: object, source: Process, earlier: dict[str, Any]
) -> None:
    """Note a source that could not hold its rate, or that was held back by missing credit, since `earlier`."""
    grown = _growth(earlier, source.ask("counters"))
    late = grown["late_steps"] / max(1.0, grown["steps"])
    if late > LATE_SHARE_MAX:
        results.problem(scenario, f"{source.name} began {late:.0%} of its steps late", case)
    if grown["stalls"] > 0.01 * max(1.0, grown["tokens"]):
        results.problem(scenario, f"credit held back {grown['stalls']:.0f} tokens of {source.name}", case)


def check_faults(results: Results, scenario: str, case: object, load: Process) -> None:
    """Note failures the load saw: figures of a failing run mean nothing."""
    counters: dict[str, Any] = load.ask("counters")
    if counters["failed"]:
        results.problem(
            scenario, f"{counters['failed']} requests failed, first: {counters['faults'][0]}", case
        )


def _growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    return {name: last[name] - value for name, value in first.items() if isinstance(value, (int, float))}
