"""Memory this process has from malloc, which includes leaks of libraries that Python does not count."""

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
    """The result of mallinfo2(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocated_bytes() -> int:
    """Return the bytes in use after a garbage collection. Skips the test if the C library has no count."""
    gc.collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().uordblks)
