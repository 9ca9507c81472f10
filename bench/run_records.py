"""A file with a JSON line per run, from which an interrupted command continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

AnyRecord = TypeVar("AnyRecord", bound=msgspec.Struct)


class RecordError(ValueError):
    """The file cannot be read. The text names the file and the line."""


class RunRecords(Generic[AnyRecord]):
    """The records of one file, oldest first. A line that was cut off by the end of its writer is dropped."""

    def __init__(self, path: Path, kind: type[AnyRecord], key: Callable[[AnyRecord], Hashable]) -> None:
        """`key`: names the run of a record."""
        self.path = path
        self._kind = kind
        self._key = key

    def read(self) -> list[AnyRecord]:
        """Return the records; of several of one run the last. Raises RecordError."""
        if not self.path.exists():
            return []
        whole = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        records: dict[Hashable, AnyRecord] = {}
        for number, line in enumerate(whole, start=1):
            try:
                record = msgspec.json.decode(line, type=self._kind)
            except msgspec.DecodeError as error:
                raise RecordError(f"{self.path}, line {number}: {error}") from error
            records[self._key(record)] = record
        return list(records.values())

    def keys(self) -> set[Hashable]:
        """Return the names of the runs with a record. Raises RecordError."""
        return {self._key(record) for record in self.read()}

    def append(self, record: AnyRecord) -> None:
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
