"""The page on one of four workers killed: a table, what was done, and what can and cannot be compared. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench import pages
from bench.pages import paragraph, spread
from bench.peers.experiment import Schedule
from bench.peers.record import Column, Record, column
from bench.peers.streams import Figures

NOT_SERVED = "none within"


@dataclass(frozen=True, slots=True)
class About:
    """What was the same for all runs."""

    schedule: Schedule
    horizon_s: float


FaultRecord = Record[About, Figures]


def line(figures: Figures) -> str:
    """Return one run as a line, for the one who waits."""
    details = f"; {'; '.join(figures.details)}" if figures.details else ""
    return (
        f"{figures.done} done, {figures.lost} lost, {figures.refused} refused, {figures.wrong} wrong, "
        f"longest pause {figures.pause_s:.3f} s, returned worker: {readmission([figures])}{details}"
    )


def readmission(runs: Iterable[Figures]) -> str:
    """Return when the returned worker served first; runs that saw nothing of it say how long they looked."""
    served = [one.readmitted_s for one in runs if one.readmitted_s is not None]
    waited = [one.watched_s for one in runs if one.readmitted_s is None]
    told = [spread(served, 2)] if served else []
    if waited:
        told.append(f"{NOT_SERVED} {spread(waited, 0)}" + (f" ({len(waited)} runs)" if served else ""))
    return "; ".join(told)


COLUMNS = (
    column("done", lambda one: one.done, 0),
    column("**lost**", lambda one: one.lost, 0),
    column("refused", lambda one: one.refused, 0),
    column("wrong", lambda one: one.wrong, 0),
    column("on the dead worker", lambda one: one.hit, 0),
    column("moved", lambda one: one.moved, 0),
    column("longest pause in a stream, s", lambda one: one.pause_s, 2),
    column("in a moved stream, s", lambda one: one.moved_pause_s, 2),
    column("before the kill, s", lambda one: one.quiet_pause_s, 2),
    column("restart took, s", lambda one: one.ready_s, 2),
    Column("first request on the returned worker, s after it was ready", readmission),
)


def page(record: FaultRecord, old: str) -> str:
    """Return the page. `old`: the page that it replaces, whose hand-written end is kept."""
    lines = [
        "# One of four workers killed: kvmesh and the routers from PyPI",
        "",
        *pages.origin(record.command, record.seconds, record.machine),
        *pages.section("What was done", [*paragraph(_procedure(record.about)), "", *paragraph(_WORDS)]),
        *pages.section("Measured", record.table(COLUMNS)),
        *_failures(record),
        *pages.section("What differs, and what this does not show", [_FAIRNESS]),
        *pages.section("What could not be measured", pages.items(record.problems)),
    ]
    return pages.with_notes(lines, old)


def _procedure(about: About) -> str:
    schedule = about.schedule
    watch = (
        f", in the first run of a case until the worker served, for up to {about.horizon_s:g} s in all"
        if about.horizon_s
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


def _failures(record: FaultRecord) -> list[str]:
    told = [
        f"- {name}, {policy}, run {number}: {'; '.join(one.details)}"
        for (name, _, policy), runs in record.runs.items()
        for number, one in enumerate(runs, 1)
        if one.details
    ]
    return ["What the clients of failed streams saw:", "", *told, ""] if told else []


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
  itself costs is the pause in a moved stream. The pause before the kill is the machine's own noise; nothing is finer."""
