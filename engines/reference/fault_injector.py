"""The effects of injected faults: the file of `--faults @PATH`, leaked memory, the death of the process.

INVARIANT: an unreadable or bad file changes no active fault. An absent or empty file means no faults. Used on the engine
thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from engines.reference import faults
from engines.reference.faults import LEAK_TOTAL_MAX_BYTES, NO_FAULTS, PATH_MARK, Faults

_log = logging.getLogger(__name__)

POLL_S: Final = 0.25  # period at which the file is read
TEXT_MAX_BYTES: Final = 4096


def absolute_option(text: str) -> str:
    """Return the option with an absolute path: the engine process may have another working directory."""
    path = faults.path_of(text)
    return text if path is None else PATH_MARK + str(Path(path).resolve())


@dataclass(slots=True)
class FaultInjector:
    """Tells which faults are active, keeps leaked memory, and kills the process with `kill`."""

    option: str
    kill: Callable[[], None]
    boot_s: float = field(default_factory=time.monotonic)
    _configured: Faults = NO_FAULTS
    _last: str = ""  # the text or the error of the last read
    _next_read_s: float = float("-inf")
    _leaked: list[bytes] = field(default_factory=list)
    _leaked_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.polls:
            self._configured = faults.parse(self.option)

    @property
    def polls(self) -> bool:
        """Return whether the faults come from a file, which is read every POLL_S."""
        return self.option.startswith(PATH_MARK)

    def active(self, now_s: float) -> Faults:
        """Return the faults that are active now; read the file if its time has come."""
        if self.polls and now_s >= self._next_read_s:
            self._next_read_s = now_s + POLL_S
            self._read(Path(self.option[1:]))
        return self._configured.at(now_s - self.boot_s)

    def leak(self, request_bytes: int, requests: int) -> None:
        """Keep `request_bytes` of resident memory for each of `requests` ended requests, up to LEAK_TOTAL_MAX_BYTES."""
        size = min(request_bytes * requests, LEAK_TOTAL_MAX_BYTES - self._leaked_bytes)
        if size > 0:
            self._leaked.append(b"\x01" * size)  # written, so that each page is resident
            self._leaked_bytes += size

    def _read(self, path: Path) -> None:
        """Take the text of the file, if it has changed."""
        try:
            text = _text_of(path)
        except (OSError, ValueError) as error:
            self._reject(path, str(error))
            return
        if text == self._last:
            return
        try:
            self._configured = faults.parse(text)
        except ValueError as error:
            self._reject(path, str(error))
        else:
            _log.warning('injected faults are now "%s"', text.strip())
        self._last = text

    def _reject(self, path: Path, reason: str) -> None:
        if self._last != reason:
            _log.error("%s: %s; the last good faults stay", path, reason)
        self._last = reason


def _text_of(path: Path) -> str:
    """Return the text of the file, empty if there is no file. Raises OSError or ValueError if it is unreadable."""
    try:
        with path.open("rb") as file:
            raw = file.read(TEXT_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if len(raw) > TEXT_MAX_BYTES:
        raise ValueError(f"faults: the file must have at most {TEXT_MAX_BYTES} bytes, got more")
    return raw.decode()
