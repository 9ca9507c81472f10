"""The record of a comparison: a table for people, JSON for machines, a page with what can and cannot be compared."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import report
from bench.peers.experiment import Schedule
from bench.peers.streams import Figures

COLUMNS = (
    "system",
    "policy",
    "runs",
    "done",
    "**lost**",
    "refused",
    "wrong",
    "on the dead worker",
    "moved",
    "longest pause in a stream, s",
    "in a moved stream, s",
    "before the kill, s",
    "restart took, s",
    "first request on the returned worker, s after it was ready",
)
NOT_SERVED = "none within"


@dataclass(slots=True)
class Record:
    """All runs of a command."""

    command: str
    machine: Mapping[str, str]
    schedule: Schedule
    horizon_s: float
    seconds: float = 0.0
    runs: dict[tuple[str, str, str], list[Figures]] = field(default_factory=dict)
    """By system, version and policy, in the order of the first run."""
    unavailable: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, policy: str, figures: Figures) -> None:
        """Add one run."""
        self.runs.setdefault((name, version, policy), []).append(figures)

    def to_json(self) -> str:
        """Return everything as JSON."""
        told: dict[str, Any] = {
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "schedule": asdict(self.schedule),
            "horizon_s": self.horizon_s,
            "runs": [
                {"system": name, "version": version, "policy": policy, "run": number, **asdict(figures)}
                for (name, version, policy), runs in self.runs.items()
                for number, figures in enumerate(runs, 1)
            ],
            "unavailable": self.unavailable,
            "problems": self.problems,
        }
        return json.dumps(told, indent=2) + "\n"


def line(name: str, policy: str, figures: Figures) -> str:
    """Return one run as a line, for the one who waits."""
    details = f"; {'; '.join(figures.details)}" if figures.details else ""
    return (
        f"{name} {policy}: {figures.done} done, {figures.lost} lost, {figures.refused} refused, {figures.wrong} wrong, "
        f"longest pause {figures.pause_s:.3f} s, returned worker: {readmission([figures])}{details}"
    )


def table(record: Record) -> str:
    """Return the table in Markdown: each cell the median, and in brackets the smallest and the largest run."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|---|{'--:|' * (len(COLUMNS) - 2)}"]
    for (name, version, policy), runs in record.runs.items():
        cells = [f"{name} {version}", policy, str(len(runs))]
        cells += [spread((read(one) for one in runs), 0) for read in _COUNTS]
        cells += [spread((read(one) for one in runs), 2) for read in _TIMES]
        cells.append(readmission(runs))
        lines.append(f"| {' | '.join(cells)} |")
    for name, reason in record.unavailable.items():
        lines.append(f"| {name} | not measured: {reason.replace('|', '/')} |{' |' * (len(COLUMNS) - 2)}")
    return "\n".join(lines) + "\n"


def spread(values: Iterable[float | None], digits: int) -> str:
    """Return the median, and the smallest and largest where they differ; a dash where there is no value."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    middle = f"{statistics.median(known):.{digits}f}"
    low, high = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    return middle if low == high else f"{middle} [{low}..{high}]"


def readmission(runs: Iterable[Figures]) -> str:
    """Return when the returned worker served first; runs that saw nothing of it say how long they looked."""
    served = [one.readmitted_s for one in runs if one.readmitted_s is not None]
    waited = [one.watched_s for one in runs if one.readmitted_s is None]
    told = [spread(served, 2)] if served else []
    if waited:
        told.append(f"{NOT_SERVED} {spread(waited, 0)}" + (f" ({len(waited)} runs)" if served else ""))
    return "; ".join(told)


def page(record: Record, notes: str) -> str:
    """Return the page. `notes`: its hand-written end, kept as it is."""
    lines = [
        "# One of four workers killed: kvmesh and the routers from PyPI",
        "",
        f"Written by `{record.command}`, {record.seconds / 60:.1f} minutes.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in record.machine.items()),
        "",
        "## What was done",
        "",
        *_paragraph(_procedure(record)),
        "",
        *_paragraph(_WORDS),
        "",
        "## Measured",
        "",
        table(record).rstrip(),
        "",
        *_failures(record),
        "## What differs, and what this does not show",
        "",
        _FAIRNESS,
    ]
    if record.problems:
        lines += ["## What could not be measured", "", *(f"- {text}" for text in record.problems), ""]
    return "\n".join([*lines, report.NOTES, notes.strip(), ""])


def _procedure(record: Record) -> str:
    schedule = record.schedule
    watch = (
        f", in the first run of a case until the worker served, for up to {record.horizon_s:g} s in all"
        if record.horizon_s
        else ""
    )
    return (
        f"{schedule.streams} clients at once, each sending one request after another: a new prompt of "
        f"{schedule.prompt_words} words, {schedule.tokens} tokens streamed, {schedule.interval_s * 1000:g} ms apart. "
        f"After {schedule.kill_s:g} s, as soon as every client is in the middle of a stream, the third of four workers is "
        f"killed with SIGKILL; {schedule.down_s:g} s later it is started again on its address. The load goes on for "
        f"{schedule.watch_s:g} s behind the moment the worker was ready{watch}. Every run starts everything anew and "
        "begins when each worker has served. Cases take turns; a cell is the median of the runs, with the "
        "smallest and the largest in brackets. Everything runs on one machine, over loopback."
    )


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _failures(record: Record) -> list[str]:
    told = [
        f"- {name}, {policy}, run {number}: {'; '.join(one.details)}"
        for (name, _, policy), runs in record.runs.items()
        for number, one in enumerate(runs, 1)
        if one.details
    ]
    return ["What the clients of failed streams saw:", "", *told, ""] if told else []


_COUNTS: tuple[Callable[[Figures], float], ...] = (
    lambda one: one.done,
    lambda one: one.lost,
    lambda one: one.refused,
    lambda one: one.wrong,
    lambda one: one.hit,
    lambda one: one.moved,
)
_TIMES: tuple[Callable[[Figures], float | None], ...] = (
    lambda one: one.pause_s,
    lambda one: one.moved_pause_s,
    lambda one: one.quiet_pause_s,
    lambda one: one.ready_s,
)
_WORDS = (
    "Clients check every answer: status, framing, each token in its order, none beyond, the finish reason, the end. "
    "**Lost**: a stream that had begun and did not come to its right end. Refused: it failed before its first token, and "
    "the client could send it again. Wrong: a token missing, repeated or altered. On the dead worker: streams it was "
    "serving when it died, as far as the client knows. Moved: streams that went on at another worker and ended right."
)
_FAIRNESS = """\
- Behind the routers are mock workers, one small process each, that answer at a fixed pace. Behind kvmesh are four decode
  replicas, each with the reference engine (`hashed`) in a real Triton server that takes as long per step. A prompt is so
  short that decode runs it alone, without prefill. kvmesh's victim is a decode service together with its Triton.
- The routers speak HTTP to clients and workers, kvmesh gRPC. Clients of both are asyncio tasks of one Python process and
  do the same checks; for kvmesh the right tokens are computed from the prompt by the client.
- The routers run with their defaults, but for the policy and, in the rows that say so, `--health-check-interval-secs 1` and
  `--cb-timeout-duration-secs 1`. None of them claims to resume a stream: its client must send the request again.
- The time from start to ready is that of a mock worker, or of Triton with its model: the column says what it was and
  compares nothing. The time from ready to the first request is the system's own.
- Throughput, latency and CPU are not compared: neither the workers nor the protocols are the same, and the pace of the
  tokens bounds the number of streams that are done.
- The longest pause is that of all streams that ended after the kill, those on other workers too: it holds what starting a
  worker again takes from the rest on a machine with few cores, for Triton far more than for a mock worker. What the fault
  itself costs is the pause in a moved stream. The pause before the kill is the machine's own noise; nothing is finer.
"""
