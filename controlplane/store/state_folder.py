"""The state folder of one control process (`--state DIR`): copies of its documents, for a Redis that lost everything.

A write is atomic: a crash leaves the old file or the new one. A full or read-only disk is logged once and never fails the
process. The functions block; the caller runs them in a thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from controlplane.store.documents import DESIRED, VALUE_BYTES_MAX, Document, is_name, read_value, value_of
from kvmesh.durable_file import replace_file

log = logging.getLogger(__name__)

_DESIRED_FILE: Final = "desired.json"
ROLLOUTS: Final = "rollout."
"""Beginning of the names of files with rollouts."""
_SUFFIX: Final = ".json"


class StateFolder:
    """The folder, or none: then nothing is read and written."""

    def __init__(self, folder: Path | None, *, prefix: str = ROLLOUTS, has_desired: bool = True) -> None:
        """`prefix`: beginning of the names of files. `has_desired`: the desired document is there too."""
        self._prefix = prefix
        self._has_desired = has_desired
        self.failure_total = 0
        """Writes that failed."""
        self._folder = folder
        self._logged = ""

    def read(self) -> dict[str, Document]:
        """Return the readable documents by name. An unreadable file is logged and ignored."""
        if self._folder is None:
            return {}
        found = {}
        desired = (self._folder / _DESIRED_FILE,) if self._has_desired else ()
        for path in (*desired, *sorted(self._folder.glob(f"{self._prefix}*{_SUFFIX}"))):
            name = self._name_of(path)
            document = self._read_one(path) if is_name(name) else None
            if document is not None:
                found[name] = document
        return found

    def write(self, name: str, document: Document) -> bool:
        """Replace the file of a document, and wait until the disk has it. Return False if the disk refuses."""
        if self._folder is None:
            return False
        try:
            replace_file(self._folder / self._file_of(name), value_of(document))
        except OSError as error:
            self.failure_total += 1
            self._log_failure(error.strerror or str(error))
            return False
        self._logged = ""
        return True

    def keep_only(self, names: set[str]) -> None:
        """Remove the files of other rollouts."""
        if self._folder is None:
            return
        for path in self._folder.glob(f"{self._prefix}*{_SUFFIX}"):
            if self._name_of(path) not in names:
                with suppress(OSError):
                    path.unlink()

    def _read_one(self, path: Path) -> Document | None:
        try:
            with path.open("rb") as file:
                document = read_value(file.read(VALUE_BYTES_MAX + 1))
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the document in %s cannot be read: %s", path, error.strerror)
            return None
        if document is None:
            log.warning("the document in %s is unreadable and is ignored", path)
        return document

    def _log_failure(self, reason: str) -> None:
        if reason != self._logged:
            self._logged = reason
            log.warning("documents cannot be written to %s: %s", self._folder, reason)

    def _file_of(self, name: str) -> str:
        return _DESIRED_FILE if name == DESIRED else f"{self._prefix}{name}{_SUFFIX}"

    def _name_of(self, path: Path) -> str:
        return DESIRED if path.name == _DESIRED_FILE else path.name[len(self._prefix) : -len(_SUFFIX)]
