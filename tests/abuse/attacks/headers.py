"""Streams of headers alone: many of them, and streams with headers that are small only on the wire (HPACK bombs)."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

from tests.abuse.attack import GRPC_CODES, Attack, Bounds, Dose, Outcome
from tests.abuse.target import FRONT, GENERATE, Target
from tests.raw_frames import headers_frames, hpack_bomb, open_headers, request_block
from tests.raw_http2 import RawConnection

PER_CONNECTION = 2_000
REFERENCES = 2_000
"""References to one header of 4 KB, a byte each on the wire: 8 MB of headers. grpcio accepts at most some 3,000."""

BOMBS_PER_CONNECTION = 25

STEADY_TICK_S = 0.02


async def flood(target: Target, dose: Dose) -> Outcome:
    """Open streams without a key, with a wrong and with a right one, and leave them open."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    callers = itertools.cycle(target.callers().values())
    per_connection = min(PER_CONNECTION, dose.count // 4)

    async def one() -> None:
        block = request_block(GENERATE, next(callers))
        with suppress(OSError, TimeoutError):
            async with RawConnection.connect(target.address(FRONT)) as connection:
                outcome.did["connections"] += 1
                outcome.did["streams"] += await connection.flood(open_headers(block, per_connection))
                await _wait(connection, until_s)
                outcome.saw["answered"] += connection.frames["HeadersFrame"]
                outcome.saw["reset"] += connection.frames["RstStreamFrame"]
                outcome.saw["connections closed"] += connection.is_closed

    async with asyncio.TaskGroup() as group:
        for _ in range(dose.count // per_connection):
            group.create_task(one())
    return outcome


async def steady(target: Target, dose: Dose) -> Outcome:
    """Open streams at an even rate on one connection with a right key: more than are read in time, fewer than a burst."""
    outcome = Outcome()
    block = request_block(GENERATE, target.callers()["right key"])
    parts = open_headers(block, dose.count)
    per_tick = max(1, round(dose.count * STEADY_TICK_S / dose.seconds))
    async with RawConnection.connect(target.address(FRONT)) as connection:
        outcome.did["connections"] += 1
        while tick := list(itertools.islice(parts, per_tick)):
            outcome.did["streams"] += await connection.flood(tick)
            await asyncio.sleep(STEADY_TICK_S)
        outcome.saw["answered"] += connection.frames["HeadersFrame"]
        outcome.saw["connections closed"] += connection.is_closed
    return outcome


async def bombs(target: Target, dose: Dose) -> Outcome:
    """Open streams with headers that decompress to 8 MB each, and leave them open."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    callers = itertools.cycle(target.callers().values())

    async def one(count: int) -> None:
        block = request_block(GENERATE, next(callers)) + hpack_bomb(REFERENCES)
        with suppress(OSError, TimeoutError):
            async with RawConnection.connect(target.address(FRONT)) as connection:
                streams = [connection.open() for _ in range(count)]
                for stream in streams:
                    connection.send(*headers_frames(stream.number, block))
                    outcome.did["streams"] += 1
                    outcome.did["MB of headers"] += REFERENCES * 4 // 1000
                await connection.drain()
                await _wait(connection, until_s)
                for stream in streams:
                    code = "open" if stream.status is None else GRPC_CODES.get(stream.status, "?")
                    outcome.saw["reset" if stream.reset_code and stream.status is None else code] += 1

    per_connection = min(BOMBS_PER_CONNECTION, dose.count // 4)
    async with asyncio.TaskGroup() as group:
        for _ in range(dose.count // per_connection):
            group.create_task(one(per_connection))
    return outcome


async def _wait(connection: RawConnection, until_s: float) -> None:
    """Stay until `until_s`, or until the peer closes the connection."""
    with suppress(TimeoutError):
        await connection.closed(max(0.0, until_s - time.monotonic()))


FLOOD = Attack(
    name="headers",
    about="Streams to Generate without a body, without a key, with a wrong and with a right one",
    run=flood,
    long=Dose(120_000, 30.0),
    short=Dose(4_000, 1.5),
    # A third of the streams have the key of the legitimate calls, and one tenant has at most half of the unread calls.
    bounds=Bounds(refusals=("CALLS_FULL",)),
)
STEADY = Attack(
    name="headers-steady",
    about="Streams to Generate without a body, at an even rate on one connection with a right key",
    run=steady,
    long=Dose(12_000, 20.0),
    short=Dose(400, 2.0),
)
BOMBS = Attack(
    name="header-bombs",
    about="Streams with headers that name one header of 4 KB 2,000 times, a byte each on the wire",
    run=bombs,
    long=Dose(600, 15.0),
    short=Dose(40, 1.0),
)
