"""Wall clocks of single parts, by libfaketime: a part's view of the time, apart from this machine's clock.

Waits use the monotonic clock and stay right, with one exception. Python's `time.sleep` fails under
libfaketime 0.9.10 (clock_nanosleep with an absolute time, EINVAL). No service calls `time.sleep`; engines are
better left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

LIBRARIES: Final = (
    Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"),
    Path("/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1"),
    Path("/usr/lib64/faketime/libfaketime.so.1"),
)

_LIBRARY_THERE: Final = "/opt/faketime/libfaketime.so.1"
_FOLDER_THERE: Final = "/opt/clock"


class Clock:
    """The wall clock of one part; its offset lies in a file that the part sees read-only."""

    def __init__(self, folder: Path) -> None:
        """Write offset 0. Raises AssertionError where libfaketime is not installed."""
        library = next((path for path in LIBRARIES if path.exists()), None)
        assert library is not None, "libfaketime is missing; on Debian: apt-get install libfaketime"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        self._file = folder / "offset"
        self.set(0)
        self.mounts = {str(library): _LIBRARY_THERE, str(folder): _FOLDER_THERE}
        self.env = {
            "LD_PRELOAD": _LIBRARY_THERE,
            "FAKETIME_TIMESTAMP_FILE": f"{_FOLDER_THERE}/offset",
            "FAKETIME_NO_CACHE": "1",  # 3 us for each read of the wall clock; in force at once
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",  # the name before 0.9.9
        }

    def set(self, seconds: float) -> None:
        """Set the clock `seconds` ahead; a negative value sets it behind."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.3f}\n")
        new.chmod(0o644)
        new.replace(self._file)
