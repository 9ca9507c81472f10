"""One measured window: CPU of the process under test and what its neighbours counted, over the same seconds."""

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
    """Streams that each get a token every `step_ms`, from `replicas` sources."""

    streams: int
    step_ms: float
    replicas: int = 1

    def __str__(self) -> str:
        text = f"{self.streams} stream{'s' * (self.streams > 1)}, {self.step_ms:g} ms"
        return text if self.replicas == 1 else f"{text}, {self.replicas} replicas"


CASES = (Case(256, 50), Case(1, 20), Case(16, 20), Case(64, 20), Case(128, 20), Case(16, 10))
"""The largest first: memory per stream is the growth of a process that had only a few streams before."""
QUICK_CASES = (Case(256, 50), Case(1, 20), Case(64, 20))


PROMPT_TOKENS = 256
ENDLESS = 500_000
"""Tokens of a stream that no window sees the end of."""
ANSWER_TOKENS = 4
SETTLE_S = 0.5
"""From the end of a load to the next one."""
LONG_SEQUENCES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": 1_000_000, "kv_blocks": 1_000_000},
    "frontend": {"max_output_tokens_max": 1_000_000},
}
"""Configuration under which streams are endless."""

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


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two moments."""

    seconds: float
    cpu_s: float
    counts: dict[str, float]
    """Growth of the load's counters."""


def measure(process: Process, load: Process, seconds: float) -> Window:
    """Watch `process` for `seconds`. The load was started and warmed up before."""
    began_s, cpu_ns, first = time.monotonic(), accounting.cpu_ns(process.pid), load.ask("counters")
    time.sleep(seconds)
    ended_s, cpu_ns = time.monotonic(), accounting.cpu_ns(process.pid) - cpu_ns
    return Window(ended_s - began_s, cpu_ns / 1e9, growth(first, load.ask("counters")))


def growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """Return by how much each counter grew."""
    return {name: last[name] - value for name, value in first.items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A process under test under a load of streams or requests, and where its figures go."""

    results: ScenarioResults
    pace: Pace
    process: Process
    load: Process
    prompt_tokens: int = PROMPT_TOKENS
    stream_tokens: int = ENDLESS
    way: str = ""
    """How it is done, where a scenario does it in several ways."""

    def name(self, case: object) -> str:
        """Return what `case` is called in the results."""
        return f"{case}, {self.way}" if self.way else str(case)

    def add(self, case: object, metric: str, unit: str, value: float) -> None:
        """Add one figure."""
        self.results.add(self.name(case), metric, unit, value)

    def problem(self, case: object, text: str) -> None:
        """Note a problem of a case: its figures are doubtful."""
        self.results.problem(text, self.name(case))

    def idle(self) -> None:
        """Add the memory of the process without load."""
        self.add("idle", aims.IDLE, "MB", accounting.rss_bytes(self.process.pid) / 1e6)

    def open(self, case: Case) -> None:
        """Hold the streams of `case` open, and warm up."""
        options = {"prompt": self.prompt_tokens, "tokens": self.stream_tokens}
        self.load.ask("open", streams=case.streams, **options)
        time.sleep(self.pace.warm_s)

    def measure(self) -> Window:
        """Watch the process for a window."""
        return measure(self.process, self.load, self.pace.window_s)

    def streams(self, case: Case, sources: Sequence[Process] = (), *, sees_frames: bool = True) -> None:
        """Hold the streams of `case` open for a window, and add what it shows.

        `sources`: they send what the process passes on, and must hold their rate. `sees_frames`: the load counts
        frames; else those that the sources sent are counted.
        """
        self.open(replace(case, streams=1))  # what a first request loads is no stream's
        before = accounting.rss_bytes(self.process.pid)
        if case.streams > 1:
            self.open(replace(case, streams=case.streams - 1))
        earlier = [source.ask("counters") for source in sources]
        window = self.measure()
        sent = [growth(old, source.ask("counters")) for source, old in zip(sources, earlier, strict=True)]
        self.add_streams(case, window, None if sees_frames else sum(counts["frames"] for counts in sent))
        if case == self.pace.cases[0]:
            grown = accounting.rss_bytes(self.process.pid) - before
            self.add(case, aims.STREAM_BYTES, "KB", grown / (case.streams - 1) / 1e3)
        for source, counts in zip(sources, sent, strict=True):
            self._check_source(case, source.name, counts)
        self.end(case)

    def add_streams(self, case: Case, window: Window, frames: float | None = None) -> None:
        """Add what a window of open streams shows. `frames`: where the load sees none."""
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
        """Send short requests at a rate and watch the process under test, or another one, for a window."""
        prompt = prompt_tokens or self.prompt_tokens
        self.load.ask("rate", per_s=per_s, prompt=prompt, tokens=ANSWER_TOKENS)
        time.sleep(self.pace.warm_s)
        return measure(process or self.process, self.load, self.pace.rate_s)

    def rate(self, case: str, per_s: float, prompt_tokens: int = 0) -> Window:
        """Send short requests at a rate for a window, and add what it shows."""
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
        """Note failures the load saw, for figures of a failing run mean nothing, and cancel what is open."""
        counters = self.load.ask("counters")
        if counters["failed"]:
            self.problem(case, f"{counters['failed']} requests failed, first: {counters['faults'][0]}")
        self.load.ask("close")
        time.sleep(SETTLE_S)

    def _check_source(self, case: Case, name: str, grown: dict[str, float]) -> None:
        """Note a source that could not hold its rate, or that was held back by its flow-control window."""
        late = grown["late_steps"] / max(1.0, grown["steps"])
        if late > LATE_SHARE_MAX:
            self.problem(case, f"{name} began {late:.0%} of its steps late")
        if grown["stalls"] > 0.01 * max(1.0, grown["tokens"]):
            self.problem(case, f"the flow-control window held back {grown['stalls']:.0f} tokens of {name}")
