"""What this process has from malloc: sees what leaks in libraries, which Python's own counts do not."""

from __future__ import annotations

import ctypes
import gc

import pytest

_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _MallocInfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocated_bytes() -> int:
    """Return what was not given back, garbage apart. Skips the test where the C library cannot tell."""
    gc.collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().uordblks)
