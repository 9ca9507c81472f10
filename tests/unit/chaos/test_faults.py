"""Faults: each name does its own to the part, and is taken back."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, call

from tests.chaos.faults import apply, undo


def test_a_link_is_cut_from_its_peer_alone_and_mended() -> None:
    """A cut has no peer: it is from all."""
    faults = AsyncMock()
    asyncio.run(apply(faults, "link", "prefill-0-engine", "decode-1-engine"))
    asyncio.run(undo(faults, "link", "prefill-0-engine"))
    asyncio.run(apply(faults, "cut", "redis"))
    assert faults.mock_calls == [
        call.cut("prefill-0-engine", from_="decode-1-engine"),
        call.mend("prefill-0-engine"),
        call.cut("redis"),
    ]


def test_a_second_process_is_started_and_killed() -> None:
    """The part itself is left alone."""
    faults = AsyncMock()
    asyncio.run(apply(faults, "duplicate", "prefill-0"))
    asyncio.run(undo(faults, "duplicate", "prefill-0"))
    assert faults.mock_calls == [call.duplicate("prefill-0"), call.end_duplicate("prefill-0")]
