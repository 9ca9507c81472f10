"""Output of the commands on a terminal: progress of a start, tables of addresses and explanations."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.cli.mesh_file import ListedProcess
from kvmesh.cli.supervisor import ProcessState, Supervised
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.redis_url import displayed_address
from kvmesh.region_sections import UNNAMED

_COLOURS: Final = {
    ProcessState.WAITING: "dim",
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.STOPPING: "yellow",
    ProcessState.RESTARTING: "yellow",
    ProcessState.ENDED: "red",
}
_REFRESHES_PER_S: Final = 4

_UNBOUNDED: Final = 1 << 16
"""Width for a measurement."""

_ADDRESSES: Final = (Column("process"), Column("pid", rank=1), Column("address"), Column("metrics", rank=2))
_ATTEMPTS: Final = tuple(
    map(Column, ("attempt", "cause", "from token", "router", "prefill", "decode", "pause", "ended by"))
)


class StartProgress:
    """Shows process states during a start: a live table on a terminal, else one line per ready process."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._states: dict[str, tuple[ProcessState, float]] = {}
        self._is_done = False
        self._live = Live(console=console, refresh_per_second=_REFRESHES_PER_S, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def done(self) -> None:
        """Stop the display; all processes are ready."""
        self._live.stop()
        self._is_done = True

    def changed(self, member: Supervised) -> None:
        """Record a process's new state and update the display."""
        after_s = time.monotonic() - self._began_s
        self._states[member.process.name] = (member.state, after_s)
        if self._live.is_started:
            self._live.update(self._table())
        elif member.state is ProcessState.READY and not self._is_done:
            self._console.print(f"{member.process.name} is ready after {after_s:.1f} s")

    def _table(self) -> Table:
        table = Table("process", "state", "after")
        for name, (state, after_s) in self._states.items():
            table.add_row(name, Text(state.value, style=_COLOURS[state]), f"{after_s:.1f} s")
        return table


def address_table(members: Iterable[ListedProcess], http_scheme: str = "http") -> FittedTable:
    """Return the table of a running mesh's addresses. A frontend has the URL of its HTTP port below that of gRPC."""
    table = FittedTable(_ADDRESSES, "mesh.json has them")
    for member in members:
        metrics = f"{member.metrics_address}/metrics" if member.metrics_address else "-"
        http = [f"{http_scheme}://{member.http_address}"] if member.http_address else []
        addresses = "\n".join((displayed_address(member.address), *http))
        table.add_row(member.name, str(member.pid or "-"), addresses, metrics)
    return table


class ExplanationTable:
    """One column per answer: replicas, cached blocks and tokens, and the time of each phase.

    Answers that do not fit beside each other come one below the other.
    """

    def __init__(self, answers: Iterable[tuple[str, inference.Finished]]) -> None:
        """`answers`: each with its title."""
        self._answers = [(title, _explained(finished)) for title, finished in answers]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table, or one for each answer."""
        table = self._table(self._answers)
        if Measurement.get(console, options.update(max_width=_UNBOUNDED), table).maximum <= options.max_width:
            yield table
        else:
            yield from (self._table([answer]) for answer in self._answers)

    @staticmethod
    def _table(answers: Sequence[tuple[str, Mapping[str, str]]]) -> Table:
        table = Table()
        table.add_column("", no_wrap=True)
        for title, _ in answers:
            table.add_column(title, overflow="fold")
        # A row that one answer alone has is empty for the others.
        for name in dict.fromkeys(name for _, values in answers for name in values):
            table.add_row(name, *(Text(values.get(name, "")) for _, values in answers))
        return table


def attempts_table(finished: inference.Finished) -> FittedTable | None:
    """Return one row per attempt: where it ran, from which token on, and why it ended. None for a single attempt."""
    attempts = finished.explanation.attempts
    if len(attempts) < 2:
        return None
    table = FittedTable(_ATTEMPTS, is_listed=True)
    for each in attempts:
        cause = inference.AttemptExplanation.Cause.Name(each.cause).removeprefix("CAUSE_").lower()
        region = f"{each.region}/" if each.region not in ("", UNNAMED) else ""
        table.add_row(
            str(each.number),
            cause,
            str(each.start_position),
            f"{region}{each.router}",
            each.prefill_replica or "on decode",
            each.decode_replica or "-",
            f"{_ms(each.pause) / 1e3:.2f} s" if each.HasField("pause") else "-",
            each.fault or "-",
        )
    return table


def candidates_table(finished: inference.Finished) -> FittedTable | None:
    """Return the candidates that the router compared for the last attempt, the chosen one first; None if there are none.

    The score of a candidate is the sum of its times.
    """
    attempts = finished.explanation.attempts
    if not attempts or not attempts[-1].candidates:
        return None
    last = attempts[-1]
    has_decode = any(one.HasField("decode") for one in last.candidates)
    names = ("matched", "queue", "prefill", "to others", *(["decode"] if has_decode else []), "score")
    table = FittedTable(
        [Column("candidate"), *(Column(name, justify="right") for name in names)], is_listed=True
    )
    for one in last.candidates:
        known_ms = [_ms(one.queue), _ms(one.prefill), *([_ms(one.decode)] if has_decode else [])]
        score_ms = one.score * 1e3
        others_ms = max(0.0, score_ms - sum(known_ms))
        times_ms = [*known_ms[:2], others_ms, *known_ms[2:], score_ms]
        matched = f"{one.matched_block_count} of {last.prompt_block_count}"
        table.add_row(one.replica, matched, *(f"{time_ms:.1f} ms" for time_ms in times_ms))
    return table


def reason(finished: inference.Finished) -> str:
    """Return the reason of the last attempt's placement in words; empty if the router gave none."""
    attempts = finished.explanation.attempts
    return attempts[-1].reason if attempts else ""


def _explained(finished: inference.Finished) -> dict[str, str]:
    explanation = finished.explanation
    last = explanation.attempts[-1] if explanation.attempts else inference.AttemptExplanation()
    transfer = f"{_ms(last.transfer):.1f} ms" if last.HasField("transfer") else "none"
    context = finished.usage.prompt_token_count + last.start_position
    # Figures of one attempt: the last one also read the output that was there.
    which = f", attempt {last.number}" if len(explanation.attempts) > 1 else ""
    return {
        "prompt": f"{finished.usage.prompt_token_count} tokens",
        "output": f"{finished.usage.output_token_count} tokens",
        "end": inference.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "pool": explanation.pool or "-",
        "model version": explanation.model_version or "-",
        **_regions(explanation),
        "router": last.router or "-",
        "prefill": last.prefill_replica or "on decode",
        "decode": last.decode_replica or "-",
        f"blocks matched{which}": f"{last.matched_block_count} of {last.prompt_block_count}",
        f"tokens cached{which}": f"{last.cached_token_count} of {context}",
        f"queue at router{which}": f"{_ms(last.router_queue):.1f} ms",
        f"queue at replica{which}": f"{_ms(last.replica_queue):.1f} ms",
        f"prefill time{which}": f"{_ms(last.prefill):.1f} ms",
        f"transfer{which}": transfer,
        "time to first token": f"{_ms(explanation.time_to_first_token):.1f} ms",
        "total": f"{_ms(explanation.total):.1f} ms",
        "attempts, takeovers": f"{len(explanation.attempts)}, {explanation.adoption_count}",
    }


def _regions(explanation: inference.Explanation) -> dict[str, str]:
    """Return the row with the region of every attempt, in their order; none in a mesh without regions."""
    regions = [attempt.region for attempt in explanation.attempts]
    return {"regions": ", ".join(each or "-" for each in regions)} if set(regions) - {"", UNNAMED} else {}


def _ms(duration: object) -> float:
    nanoseconds: int = duration.ToNanoseconds()  # type: ignore[attr-defined]  # a protobuf Duration
    return nanoseconds / 1e6
