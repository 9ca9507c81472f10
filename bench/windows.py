"""Measured windows: CPU of the process under test and the counters of its load over the same seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench import accounting, aims
from bench.processes import Process
from bench.results import ScenarioResults


@dataclass(frozen=True, slots=True)
class Case:
    """A number of streams. Each gets a token every `step_ms` from one of `replicas` sources."""

    streams: int
    step_ms: float
    replicas: int = 1

    def __str__(self) -> str:
        text = f"{self.streams} stream{'s' * (self.streams > 1)}, {self.step_ms:g} ms"
        return text if self.replicas == 1 else f"{text}, {self.replicas} replicas"


CASES = (Case(256, 50), Case(1, 20), Case(16, 20), Case(64, 20), Case(128, 20), Case(16, 10))
"""The largest case first: memory per stream is the growth of a process that had few streams before."""
QUICK_CASES = (Case(256, 50), Case(1, 20), Case(64, 20))


PROMPT_TOKENS = 256
ENDLESS = 500_000
"""Tokens of a stream that outlasts every window."""
ANSWER_TOKENS = 4
SETTLE_S = 0.5
"""Pause between two loads."""
LONG_SEQUENCES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": 1_000_000, "kv_blocks": 1_000_000},
    "frontend": {"max_output_tokens_max": 1_000_000},
}
"""Configuration for endless streams."""

LATE_SHARE_MAX = 0.1
"""Share of a source's steps that may be late by a quarter step.

Late steps merge frames, and a token in a merged frame takes less CPU.
"""


WAIT_SHARE_MAX = 0.02
"""Share of a window for which the process under test may wait for its core, because of work of others there."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Repeats and durations of a run."""

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


@dataclass(frozen=True, slots=True)
class Window:
    """Growth of time, CPU and counters over a window."""

    seconds: float
    cpu_s: float
    counts: dict[str, float]
    """Growth of the load's counters."""
    wait_s: float = 0.0
    """Time for which the process was ready and waited for its core."""

    @property
    def is_quiet(self) -> bool:
        """True if other work hardly kept the process from its core."""
        return self.wait_s <= WAIT_SHARE_MAX * self.seconds


def measure(process: Process, load: Process, seconds: float) -> Window:
    """Measure `process` for `seconds`, under a load that is warmed up."""
    pid = process.pid
    began_s, cpu_ns, wait_ns = time.monotonic(), accounting.cpu_ns(pid), accounting.wait_ns(pid)
    first = load.ask("counters")
    time.sleep(seconds)
    ended_s, cpu_ns, wait_ns = (
        time.monotonic(),
        accounting.cpu_ns(pid) - cpu_ns,
        accounting.wait_ns(pid) - wait_ns,
    )
    return Window(ended_s - began_s, cpu_ns / 1e9, growth(first, load.ask("counters")), wait_ns / 1e9)


def growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """Return by how much each counter grew."""
    return {name: last[name] - value for name, value in first.items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A process under test with its load of streams or requests, and the results."""

    results: ScenarioResults
    pace: Pace
    process: Process
    load: Process
    prompt_tokens: int = PROMPT_TOKENS
    stream_tokens: int = ENDLESS
    way: str = ""
    """Variant of the scenario, such as TLS; empty: there is one."""

    def name(self, case: object) -> str:
        """Return the name of `case` in the results."""
        return f"{case}, {self.way}" if self.way else str(case)

    def add(self, case: object, metric: str, unit: str, value: float) -> None:
        """Add one figure."""
        self.results.add(self.name(case), metric, unit, value)

    def problem(self, case: object, text: str) -> None:
        """Record a problem of a case: its figures are doubtful."""
        self.results.problem(text, self.name(case))

    def idle(self) -> None:
        """Add the memory of the process without load."""
        self.add("idle", aims.IDLE, "MB", accounting.rss_bytes(self.process.pid) / 1e6)

    def open(self, case: Case) -> None:
        """Open the streams of `case`, and warm up."""
        options = {"prompt": self.prompt_tokens, "tokens": self.stream_tokens}
        self.load.ask("open", streams=case.streams, **options)
        time.sleep(self.pace.warm_s)

    def measure(self) -> Window:
        """Measure the process for a window."""
        return measure(self.process, self.load, self.pace.window_s)

    def streams(
        self,
        case: Case,
        sources: Sequence[Process] = (),
        *,
        sees_frames: bool = True,
        is_first: bool | None = None,
    ) -> None:
        """Hold the streams of `case` open for a window and add its figures.

        `sources`: the stubs that pace the tokens, checked for their rate. `sees_frames`: the load counts frames;
        otherwise the frames of the sources count. `is_first`: also measure
        memory; None: only in the first case of the pace.
        """
        self.open(replace(case, streams=1))  # memory that a first request loads belongs to no stream
        before = accounting.rss_bytes(self.process.pid)
        if case.streams > 1:
            self.open(replace(case, streams=case.streams - 1))
        earlier = [source.ask("counters") for source in sources]
        window = self.measure()
        sent = [growth(old, source.ask("counters")) for source, old in zip(sources, earlier, strict=True)]
        self.add_streams(case, window, None if sees_frames else sum(counts["frames"] for counts in sent))
        if case == self.pace.cases[0] if is_first is None else is_first:
            grown = accounting.rss_bytes(self.process.pid) - before
            self.add(case, aims.STREAM_BYTES, "KB", grown / (case.streams - 1) / 1e3)
            if grown <= 0:
                self.problem(
                    case, f"the memory shrank by {-grown / 1e6:.1f} MB, so streams took what was freed"
                )
        for source, counts in zip(sources, sent, strict=True):
            self._check_source(case, source.name, counts)
        self.end(case)

    def add_streams(self, case: Case, window: Window, frames: float | None = None) -> None:
        """Add the figures of a window of open streams. `frames`: those of the sources, if the load counts none."""
        tokens, frames = window.counts["tokens"], window.counts["frames"] if frames is None else frames
        if not tokens or not frames:
            self.problem(case, "no token arrived in the window")
            return
        expected = case.streams / case.step_ms * 1000 * window.seconds
        if tokens < 0.97 * expected:
            self.problem(case, f"{tokens / expected:.0%} of the paced tokens arrived")
        self.add(case, aims.PER_TOKEN, "us", window.cpu_s / tokens * 1e6)
        self.add(case, aims.PER_FRAME, "us", window.cpu_s / frames * 1e6)
        self.add(case, aims.ROWS, "rows", window.counts["rows"] / frames)

    def requests(self, per_s: float, process: Process | None = None, prompt_tokens: int = 0) -> Window:
        """Send short requests at a rate and measure the process under test, or another one, for a window."""
        prompt = prompt_tokens or self.prompt_tokens
        self.load.ask("rate", per_s=per_s, prompt=prompt, tokens=ANSWER_TOKENS)
        time.sleep(self.pace.warm_s)
        return measure(process or self.process, self.load, self.pace.rate_s)

    def rate(self, case: str, per_s: float, prompt_tokens: int = 0) -> Window:
        """Send short requests at a rate for a window and add its figures."""
        window = self.requests(per_s, prompt_tokens=prompt_tokens)
        finished = window.counts["finished"]
        if finished < 0.85 * per_s * window.seconds:
            self.problem(case, f"{finished / window.seconds:.0f} of {per_s:g} requests/s were finished")
        if finished:
            self.add(case, aims.PER_REQUEST, "ms", window.cpu_s / finished * 1e3)
            self.add(case, "share of the core", "%", window.cpu_s / window.seconds * 100)
        self.end(case)
        return window

    def end(self, case: object) -> None:
        """Record failures of the load, since they make figures doubtful. Cancel all streams."""
        counters = self.load.ask("counters")
        if counters["failed"]:
            self.problem(case, f"{counters['failed']} requests failed, first: {counters['faults'][0]}")
        self.load.ask("close")
        time.sleep(SETTLE_S)

    def _check_source(self, case: Case, name: str, grown: dict[str, float]) -> None:
        """Record a source that was too slow for its rate, or held back by its flow-control window."""
        late = grown["late_steps"] / max(1.0, grown["steps"])
        if late > LATE_SHARE_MAX:
            self.problem(case, f"{name} began {late:.0%} of its steps late")
        if grown["stalls"] > 0.01 * max(1.0, grown["tokens"]):
            self.problem(case, f"the flow-control window held back {grown['stalls']:.0f} tokens of {name}")
