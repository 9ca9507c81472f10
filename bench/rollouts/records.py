"""The record of one run, and the file of all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench.rollouts.cases import BY_NAME, Case
from bench.run_records import RunRecords


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. Times are seconds; an absent one was not measured."""

    case: str
    run: int
    """From 1."""
    commit: str
    cpu: str
    took_s: float
    state: str
    """The last state of the rollout."""
    step: int
    """Step at the decision."""
    weight_percent: int
    """Weight of that step."""
    gate: str
    reason: str
    rollout_s: float
    """From the start of the rollout to its end."""
    back_s: float | None = None
    """From the begin of the fault to weight 0 at every frontend."""
    arrived: int = 0
    bad: int = 0
    errors: int = 0
    wrong: int = 0
    silent: int = 0
    bound: float = 0.0
    hang_s: float | None = None
    """From the tenth open request that hangs to weight 0 at every frontend."""
    turns: int = 0
    sessions_per_s: float = 0.0
    bad_outside: int = 0
    """Bad answers of a run without a fault, or before the fault began."""
    hit_ratio: float | None = None
    ttft_p95_s: float | None = None
    quiet_p95_s: float | None = None
    """The same without a rollout."""
    busy_percent: float = 0.0
    """Use of all cores while the rollout ran."""
    problems: tuple[str, ...] = ()
    """Reasons to doubt the run."""

    @property
    def is_as_wanted(self) -> bool:
        """True if the rollout ended as it must, within the bounds of its case."""
        wanted = BY_NAME[self.case]
        is_in_time = not wanted.is_hang or (self.hang_s is not None and self.hang_s <= HANG_S_MAX)
        return self.state == wanted.wanted and (not wanted.is_faulty or self.bad <= self.bound) and is_in_time


HANG_S_MAX = 30.0


class Records(RunRecords[Record]):
    """The records of one file, oldest first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Record, lambda record: (record.case, record.run))

    def missing(self, runs: Iterable[tuple[Case, int]]) -> list[tuple[Case, int]]:
        """Return the runs without a record. Raises RecordError."""
        there = self.keys()
        return [(case, run) for case, run in runs if (case.name, run) not in there]
