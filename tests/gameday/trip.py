"""Measures the first token of a request that another region serves over a link of 40 ms, against one at that region itself.

The first region has no decode replica, so its frontends send each request to the second one. Clients outside both regions
ask both in turn, one request at a time, without a delay of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.results import BenchError, quantile
from tests.gameday import calls, drawing
from tests.gameday.calls import Call
from tests.gameday.capacity import Say
from tests.gameday.clients import Clients, play_of
from tests.gameday.day import new_day
from tests.gameday.shapes import EQUAL, REGIONS, USERS

TRIP_S: Final = 0.04
"""Round trip of the link."""

EXTRA_S_MAX: Final = 0.003
"""Time beyond the round trip by which the first token may be later."""

CONVERSATIONS: Final = 60
MEASURE_S: Final = 600.0
ENDED_S_MAX: Final = 400.0
LOOK_S: Final = 1.0


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in seconds."""

    near_s: float
    """First token of a request at the region that serves it."""
    far_s: float
    """First token of a request at the other region."""
    requests: int

    @property
    def added_s(self) -> float:
        """Time that the other region adds."""
        return self.far_s - self.near_s

    @property
    def is_met(self) -> bool:
        """True if the first token is at most a round trip and EXTRA_S_MAX later."""
        return self.added_s <= TRIP_S + EXTRA_S_MAX


async def measure_trip(folder: Path, tag: str, say: Say) -> Trip:
    """Raises BenchError and AssertionError."""
    near, far = REGIONS[1], REGIONS[0]
    versions = [EQUAL.version(near)]
    truths = drawing.truths_of(versions)
    say("draws conversations")
    conversations = [
        await asyncio.to_thread(
            drawing.conversation, number, 0.0, (near, far)[number % 2], versions, truths, "trip", kind=USERS
        )
        for number in range(CONVERSATIONS)
    ]
    day = new_day(EQUAL, (far, near), folder, tag)
    try:
        say("starts two regions")
        await day.mesh.start()
        await day.federated()
        await day.seen_well(*day.mesh.regions)
        await day.mesh.kill_role(far, "decode")
        await day.link.slow(far, near, TRIP_S / 2)
        clients = Clients(await day.mesh.station(), day.mesh.folder / "stations")
        say("measures the first token")
        await clients.start(
            play_of(day, time.monotonic() + 1.0, conversations, is_pressed=True, lanes=1), MEASURE_S
        )
        found = await _all(clients, len(conversations) * drawing.TURNS)
    finally:
        await asyncio.shield(day.mesh.stop())
    return trip_of(found, near, far)


async def _all(clients: Clients, count: int) -> list[Call]:
    """Wait for `count` calls, then end the load."""
    end_s = time.monotonic() + ENDED_S_MAX
    while len(calls.read(clients.folder / "calls.jsonl")) < count and time.monotonic() < end_s:
        await clients.until(time.monotonic() + LOOK_S)
    return await clients.stop()


def trip_of(found: Sequence[Call], near: str, far: str) -> Trip:
    """Return the medians of the good calls that `near` served, without the first turns of both. Raises BenchError."""
    seconds: dict[str, list[float]] = {near: [], far: []}
    for call in found:
        if call.outcome == calls.GOOD and call.tried == (near,) and call.frontend == call.home and call.turn:
            assert call.first_s is not None, call
            seconds[call.home].append(call.first_s - call.sent_s)
    few = [home for home, each in seconds.items() if len(each) < CONVERSATIONS]
    if few:
        outcomes = sorted(
            {(call.home, call.frontend, call.tried, call.outcome, call.reason) for call in found}
        )
        raise BenchError(f"fewer than {CONVERSATIONS} calls of {', '.join(few)} count; seen: {outcomes}")
    return Trip(
        near_s=round(quantile(seconds[near], 0.5), 5),
        far_s=round(quantile(seconds[far], 0.5), 5),
        requests=sum(map(len, seconds.values())),
    )


def summary(trip: Trip) -> str:
    """Return the result in one line."""
    told = "met" if trip.is_met else "MISSED"
    return (
        f"first token after {1000 * trip.near_s:.1f} ms, over a link of {1000 * TRIP_S:.0f} ms after "
        f"{1000 * trip.far_s:.1f} ms: {1000 * trip.added_s:.1f} ms later, at most "
        f"{1000 * (TRIP_S + EXTRA_S_MAX):.0f} ms allowed, {told} (medians of {trip.requests} requests)"
    )
