"""The page on one of four workers killed: procedure, table, limits of the comparison. Pure."""

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
    """Settings that all runs share."""

    schedule: Schedule
    horizon_s: float


FaultRecord = Record[About, Figures]


def line(figures: Figures) -> str:
    """Return one run as a line, for progress output."""
    details = f"; {'; '.join(figures.details)}" if figures.details else ""
    return (
        f"{figures.done} done, {figures.lost} lost, {figures.refused} refused, {figures.wrong} wrong, "
        f"longest pause {figures.pause_s:.3f} s, returned worker: {readmission([figures])}{details}"
    )


def readmission(runs: Iterable[Figures]) -> str:
    """Return the time of the returned worker's first request; for runs without one, the time watched."""
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
    """Return the page. `old`: the previous page; its hand-written end is kept."""
    lines = [
        "# One of four workers killed: kvmesh and the routers from PyPI",
        "",
        *pages.origin(record.command, record.seconds, record.machine),
        *pages.section("Procedure", [*paragraph(_procedure(record.about)), "", *paragraph(_WORDS)]),
        *pages.section("Measured", record.table(COLUMNS)),
        *_failures(record),
        *pages.section("Differences between the systems, and limits", [_FAIRNESS]),
        *pages.section("Not measured", pages.items(record.problems)),
    ]
    return pages.with_notes(lines, old)


def _procedure(about: About) -> str:
    schedule = about.schedule
    watch = (
        f" In the first run of a case it goes on until the worker has served, for up to {about.horizon_s:g} s in all."
        if about.horizon_s
        else ""
    )
    return (
        f"{schedule.streams} clients run at once, each with one request after another: a new prompt of "
        f"{schedule.prompt_words} words and {schedule.tokens} streamed tokens, {schedule.interval_s * 1000:g} ms apart. "
        f"After {schedule.kill_s:g} s, once every client is in the middle of a stream, the third of four workers is "
        f"killed with SIGKILL. {schedule.down_s:g} s later the worker is started again on its address. The load goes on "
        f"for {schedule.watch_s:g} s after the worker is ready.{watch} Every run starts all processes anew and begins "
        "when each worker has served. Cases take turns. A cell is the median of the runs, with the smallest and the "
        "largest in brackets. All processes run on one machine, over loopback."
    )


def _failures(record: FaultRecord) -> list[str]:
    told = pages.items(
        f"{name}, {policy}, run {number}: {'; '.join(one.details)}"
        for (name, _, policy), runs in record.runs.items()
        for number, one in enumerate(runs, 1)
        if one.details
    )
    return ["Errors of failed streams, as their clients saw them:", "", *told, ""] if told else []


_WORDS = (
    "Clients check every answer: status, framing, each token in its order, none beyond, the finish reason, the end. "
    "**Lost**: the stream had begun and did not end as expected. Refused: the request failed before its first token, and "
    "the client could send it again. Wrong: a token was missing, repeated or altered. On the dead worker: streams on the "
    "worker when it died, as far as the client knows. Moved: streams that continued on another worker and ended as "
    "expected."
)
_FAIRNESS = """\
- Behind the routers are mock workers, one small process each, that answer at a fixed pace. Behind kvmesh are four decode
  replicas, each with the reference engine (`hashed`) in a real Triton server. An engine step takes as long as the pace of a
  mock worker. A prompt is so short that decode runs it alone, without prefill. In kvmesh, the killed worker is a decode
  service together with its Triton.
- The routers speak HTTP to clients and workers, kvmesh gRPC. Clients of both are asyncio tasks of one Python process and
  do the same checks. For kvmesh, the client computes the expected tokens from the prompt.
- The routers run with their defaults, except for the policy. The rows that say so add `--health-check-interval-secs 1` and
  `--cb-timeout-duration-secs 1`. None of the routers claims to resume a stream: its client must send the request again.
- The time from start to ready is that of a mock worker, or of Triton with its model. The column states it and compares
  nothing. The time from ready to the first request is the system's own.
- Throughput and latency are not compared, because workers and protocols differ. The pace of the tokens bounds the number
  of streams that are done. [Another page](peers-cost.md) compares the CPU.
- The longest pause is taken over all streams that ended after the kill, including those on other workers. It contains the
  time that the restart takes from other processes on a machine with few cores. A Triton takes far more than a mock
  worker. The pause in a moved stream is the cost of the fault itself. The pause before the kill is the noise of the
  machine; no figure is finer."""
