"""The record of one run, and the file with a JSON line per run, from which an interrupted command continues."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench.rollouts.cases import BY_NAME, Case


class RecordError(ValueError):
    """The file cannot be read. The text names the file and the line."""


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


class Records:
    """The records of one file, oldest first. A line that was cut off by the end of its writer is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Record]:
        """Return the records; of several of one run the last. Raises RecordError."""
        if not self.path.exists():
            return []
        whole = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        records: dict[tuple[str, int], Record] = {}
        for number, line in enumerate(whole, start=1):
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError as error:
                raise RecordError(f"{self.path}, line {number}: {error}") from error
            records[record.case, record.run] = record
        return list(records.values())

    def missing(self, runs: Iterable[tuple[Case, int]]) -> list[tuple[Case, int]]:
        """Return the runs without a record."""
        there = {(record.case, record.run) for record in self.read()}
        return [(case, run) for case, run in runs if (case.name, run) not in there]

    def append(self, record: Record) -> None:
        """Append a record and flush it to disk. An incomplete last line is removed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def put_aside(self) -> None:
        """Rename the file, so that a new one begins."""
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".old"))
