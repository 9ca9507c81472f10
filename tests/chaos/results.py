"""The results file: one JSON line per run, appended when the run is judged. An interrupted matrix can resume from it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.chaos.cells import Run, everything
from tests.chaos.records import Record


class ResultsError(ValueError):
    """The results file cannot be read; the text names the file and the line."""


class Results:
    """The records of one file, oldest first. A line that was cut off by the end of its writer is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Record]:
        """Return the records; of several records of a run the last. Raises ResultsError."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        lines = text.split("\n")
        whole = lines[:-1]  # the text behind the last line break is incomplete
        records: dict[tuple[str, str, int], Record] = {}
        for number, line in enumerate(whole, start=1):
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.DecodeError as error:
                raise ResultsError(f"{self.path}, line {number}: {error}") from error
            records.pop(record.key, None)
            records[record.key] = record
        return list(records.values())

    def missing(self, runs: Iterable[Run], *, redo: bool = False) -> list[Run]:
        """Return those of `runs` that have no record yet, in their order; with `redo` those with violations, too."""
        there = {record.key for record in self.read() if not (redo and record.violations)}
        return [run for run in runs if (run.cell.part, run.cell.fault, run.seed) not in there]

    def publish(self, path: Path) -> None:
        """Write the records to `path`, in the order of the matrix, and delete this file."""
        order = {(cell.part, cell.fault): index for index, cell in enumerate(everything())}
        records = sorted(self.read(), key=lambda record: (order[record.part, record.fault], record.seed))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        self.path.unlink()

    def append(self, record: Record) -> None:
        """Append a record and flush it to disk. An incomplete last line is removed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
