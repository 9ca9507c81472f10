"""Faults: each name does its own to the part, and is taken back."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock, call

import pytest
from docker.errors import APIError

from tests.chaos.faults import apply, undo
from tests.integration.containers.faults import PAUSE_TRIES, Faults


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


@pytest.mark.parametrize("failures", [0, 2, PAUSE_TRIES])
def test_a_busy_container_is_paused_at_a_later_try(failures: int) -> None:
    """The Docker engine gives up while processes of a container begin and end; only so often is it asked again."""
    part = Mock(in_thread=AsyncMock(side_effect=lambda work: work()))
    part.docker.pause.side_effect = [APIError("unable to freeze: unknown")] * failures + [None]
    pausing = Faults(Mock(parts={"decode-1": part})).pause("decode-1")
    if failures < PAUSE_TRIES:
        asyncio.run(pausing)
    else:
        with pytest.raises(APIError):
            asyncio.run(pausing)
    assert part.docker.pause.call_count == min(failures + 1, PAUSE_TRIES)


def test_a_container_that_does_not_run_is_not_paused_again() -> None:
    """It would not be there at the next try either."""
    part = Mock(in_thread=AsyncMock(side_effect=lambda work: work()))
    part.docker.pause.side_effect = APIError("Container 12 is not running")
    with pytest.raises(APIError):
        asyncio.run(Faults(Mock(parts={"decode-1": part})).pause("decode-1"))
    assert part.docker.pause.call_count == 1
