"""tests/kubernetes/load.py: the wait for streams."""

from __future__ import annotations

from tests.chaos.truth import Truth
from tests.kubernetes.load import Load


async def test_streams_that_stand_still_are_a_fault() -> None:
    """A step is no success when nothing was served in it."""
    load = Load(list, Truth("salt", 512), [], 8)
    assert await load.more(0) == []
    assert await load.more(8, 0.01) == ["0 streams completed within 0 s, 8 were expected"]
