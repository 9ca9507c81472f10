"""The record of one fault in a region, its judge, and the file of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from bench.run_records import RunRecords
from tests.chaos.cells import Run
from tests.chaos.records import Violation
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, REFUSED, WRONG, Call
from tests.gameday.shapes import PINNED


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    part: str
    fault: str
    seed: int
    commit: str
    machine: str
    began: str
    seconds: float
    streams: int = 0
    in_flight: int = 0
    """Streams of the target's callers that the fault found open."""
    lost: int = 0
    refused: int = 0
    resumed: int = 0
    tokens: int = 0
    """Output tokens compared."""
    served: Mapping[str, int] = {}
    """Good streams of the target's callers during the fault, by the region that served them."""
    longest_s: float = 0.0
    """Longest good stream of the target's callers."""
    cpu_share: float = 0.0
    late_s: float = 0.0
    violations: tuple[Violation, ...] = ()


class RegionRecords(RunRecords[RegionRecord]):
    """The records of one file, oldest first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, RegionRecord, lambda record: (record.part, record.fault, record.seed))

    def missing(self, runs: Iterable[Run], *, redo: bool = False) -> list[Run]:
        """Return the runs without a record; with `redo` those with violations, too. Raises RecordError."""
        there = {(each.part, each.fault, each.seed) for each in self.read() if not (redo and each.violations)}
        return [run for run in runs if (run.cell.part, run.cell.fault, run.seed) not in there]


def judge(found: Sequence[Call]) -> list[Violation]:
    """Return the violations of the clients' view: lost and wrong streams, refusals without RetryInfo, a broken residency.

    A pinned tenant may lose its stream with its region. A refusal with RetryInfo is none.
    """
    made = []
    for call in found:
        who = f"{call.kind} of {call.home}, conversation {call.conversation}, turn {call.turn}"
        is_pinned = call.kind == PINNED
        if call.outcome == WRONG:
            made.append(Violation("WRONG", f"{who}: a wrong token after {call.output_tokens}"))
        elif call.outcome in (CUT, FAILED, BARE) and not is_pinned:
            told = (
                f"{who}: {call.outcome} with {call.reason or 'no reason'} after {call.output_tokens} tokens"
            )
            made.append(Violation("LOST", told))
        if is_pinned and {*call.tried} - {call.home}:
            made.append(Violation("RESIDENCY", f"{who}: tried in {', '.join(call.tried)}"))
    if not any(call.outcome == GOOD for call in found):
        made.append(Violation("LOST", f"none of {len(found)} streams was good"))
    return made


def figures(found: Sequence[Call], target: str, struck_s: float, healed_s: float) -> dict[str, object]:
    """Return the fields of a record that the calls give. Times are those of the calls."""
    own = [call for call in found if call.home == target]
    good = [call for call in own if call.outcome == GOOD]
    served: dict[str, int] = {}
    for call in good:
        if struck_s <= call.sent_s < healed_s:
            served[call.served] = served.get(call.served, 0) + 1
    return {
        "streams": len(found),
        "in_flight": sum(call.sent_s < struck_s < call.ended_s for call in own),
        "lost": sum(call.outcome in (CUT, FAILED, BARE, WRONG) and call.kind != PINNED for call in found),
        "refused": sum(call.outcome == REFUSED for call in found),
        "resumed": sum(call.resumes for call in found),
        "tokens": sum(call.output_tokens for call in found),
        "served": served,
        "longest_s": round(max((call.ended_s - call.sent_s for call in good), default=0.0), 2),
    }
