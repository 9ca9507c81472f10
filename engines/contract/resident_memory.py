"""The resident memory (RSS) of this process, for the load report."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

READ_PERIOD_S: Final = 1.0
_STATM: Final = Path("/proc/self/statm")


@dataclass(slots=True)
class ResidentMemory:
    """Reads the RSS at most once per READ_PERIOD_S. Not thread-safe."""

    path: Path = _STATM
    _bytes: int = 0
    _next_read_s: float = float("-inf")

    def read_bytes(self, now_s: float) -> int:
        """Return the RSS in bytes; 0: unknown."""
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + READ_PERIOD_S
            try:
                pages = int(self.path.read_text(encoding="ascii").split()[1])
            except (OSError, ValueError, IndexError):
                pages = 0
            self._bytes = pages * os.sysconf("SC_PAGE_SIZE")
        return self._bytes
