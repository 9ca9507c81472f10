"""Measures the capacity of one region alone: conversations without pauses, more than it can take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.results import BenchError
from tests.chaos import machine
from tests.chaos.cpu import CpuShare
from tests.gameday import calls, drawing
from tests.gameday.calls import Call
from tests.gameday.clients import Clients, play_of
from tests.gameday.day import new_day
from tests.gameday.records import Capacity
from tests.gameday.shapes import EQUAL, REGIONS, USERS

LANES: Final = 16
"""Conversations at once in the measurement of a capacity: the queue delay of all stays below its limit."""

PRESS_WARM_S: Final = 12.0
PRESS_S: Final = 30.0
PRESS_CONVERSATIONS: Final = 160

Say = Callable[[str], None]


async def measure_capacity(folder: Path, tag: str, say: Say) -> Capacity:
    """Load one region of 1 + 1, alone, with more than it can take. Raises BenchError and AssertionError."""
    say("draws conversations")
    home, versions = REGIONS[0], [EQUAL.version(REGIONS[0])]
    truths = drawing.truths_of(versions)
    conversations = [
        await asyncio.to_thread(
            drawing.conversation, number, 0.0, home, versions, truths, "capacity", kind=USERS
        )
        for number in range(PRESS_CONVERSATIONS)
    ]
    day = new_day(EQUAL, (home,), folder, tag)
    try:
        say("starts a region")
        await day.mesh.start()
        clients = Clients(await day.mesh.station(), day.mesh.folder / "stations")
        say("measures the capacity")
        begin_s = time.monotonic() + 1.0
        await clients.start(play_of(day, begin_s, conversations, is_pressed=True, lanes=LANES), 300.0)
        await clients.until(begin_s + PRESS_WARM_S)
        cpu = CpuShare()
        await clients.until(begin_s + PRESS_WARM_S + PRESS_S)
        busy = cpu.share()
        found = await clients.stop()
    finally:
        await asyncio.shield(day.mesh.stop())
    return capacity_of(found, begin_s + PRESS_WARM_S, PRESS_S, busy=busy, late_s=clients.late_s)


def capacity_of(
    found: Sequence[Call], from_s: float, for_s: float, *, busy: float = 0.0, late_s: float = 0.0
) -> Capacity:
    """Return the capacity from the good calls that ended within a time. Raises BenchError without one."""
    good = [call for call in found if call.outcome == calls.GOOD and from_s <= call.ended_s < from_s + for_s]
    prompts = sum(call.prompt_tokens for call in good)
    if not prompts:
        reasons = {call.reason for call in found}
        raise BenchError(f"no good call of {len(found)} ended in the measured time; reasons: {reasons}")
    uncached = prompts - sum(call.cached_tokens for call in good)
    return Capacity(
        requests_per_s=round(len(good) / for_s, 3),
        tokens_per_s=round(uncached / for_s, 1),
        hit_ratio=round(1.0 - uncached / prompts, 4),
        commit=machine.commit(),
        cpu=machine.about(),
        busy=round(busy, 3),
        late_s=round(late_s, 3),
    )
