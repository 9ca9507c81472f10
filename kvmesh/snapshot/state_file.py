"""What a process keeps in its state folder (`--state DIR`): its snapshot, and the rollouts that were taken back.

Both outlive a restart while Redis is empty. The snapshot alone may have a weight of a rollout that was taken back later,
if the process refused the snapshot that said so. A write is atomic: a crash leaves the old file or the new one. A full or
read-only disk is logged once and never fails the process. The functions block; the caller runs writes in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.durable_file import replace_file
from kvmesh.snapshot.content import ENDED_MAX, NAME_BYTES_MAX, SnapshotError
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX, Published, read

log = logging.getLogger(__name__)

FILE_NAME: Final = "snapshot"
ENDED_FILE_NAME: Final = "ended-rollouts.json"

_ENDED_BYTES_MAX: Final = ENDED_MAX * (6 * NAME_BYTES_MAX + 4)
"""Largest list: JSON escapes a byte with up to six."""


class StateFile:
    """The files in the folder of one process, or no files without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.failure_total = 0
        """Writes that failed."""
        self._folder = folder
        self._logged = ""

    @property
    def is_there(self) -> bool:
        """True if the process has a state folder."""
        return self._folder is not None

    def read(self) -> Published | None:
        """Return the snapshot in the file. None: there is no folder, no file, or an unreadable one, which is logged."""
        data = self._read(FILE_NAME, SNAPSHOT_BYTES_MAX)
        try:
            return read(data) if data is not None else None
        except SnapshotError as error:
            self._log_unreadable(FILE_NAME, error)
            return None

    def read_ended(self) -> tuple[str, ...]:
        """Return the rollouts that were taken back, the latest last. Empty without a readable file."""
        data = self._read(ENDED_FILE_NAME, _ENDED_BYTES_MAX)
        try:
            return tuple(msgspec.json.decode(data, type=list[str])[-ENDED_MAX:]) if data is not None else ()
        except msgspec.DecodeError as error:
            self._log_unreadable(ENDED_FILE_NAME, error)
            return ()

    def write(self, snapshot: Published) -> bool:
        """Replace the file, and wait until the disk has it. Return False if the disk refuses; that is logged once."""
        return self._write(FILE_NAME, snapshot.data)

    def write_ended(self, rollouts: Sequence[str]) -> bool:
        """Replace the list of the rollouts that were taken back. Else as `write`."""
        return self._write(ENDED_FILE_NAME, msgspec.json.encode(list(rollouts)))

    def _read(self, name: str, most_bytes: int) -> bytes | None:
        if self._folder is None:
            return None
        try:
            with (self._folder / name).open("rb") as file:
                return file.read(most_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_unreadable(name, error)
            return None

    def _write(self, name: str, data: bytes) -> bool:
        if self._folder is None:
            return False
        try:
            replace_file(self._folder / name, data)
        except OSError as error:
            self.failure_total += 1
            reason = error.strerror or str(error)
            if reason != self._logged:
                self._logged = reason
                log.warning("the state cannot be written to %s: %s", self._folder / name, reason)
            return False
        if self._logged:
            self._logged = ""
            log.info("the state is written to %s again", self._folder / name)
        return True

    def _log_unreadable(self, name: str, error: Exception) -> None:
        assert self._folder is not None
        log.warning("the state in %s is unreadable and is ignored: %s", self._folder / name, error)
