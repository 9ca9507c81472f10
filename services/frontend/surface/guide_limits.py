"""Limits of the process that reads guides. A module of its own: the frontend itself does without the library."""

from __future__ import annotations

from typing import Final

SECONDS_MAX: Final = 1.0
"""CPU time for one guide."""
MEMORY_BYTES_MAX: Final = 256 << 20
"""Memory above that of a process without a guide."""
