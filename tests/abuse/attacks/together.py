"""Endless bodies, headers without a body and idle connections, all at once and without a known key."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

from tests.abuse.attack import Attack, Dose, Outcome, merged
from tests.abuse.attacks import bodies, connections
from tests.abuse.target import FRONT, GENERATE, Target
from tests.raw_frames import Metadata, open_headers, request_block
from tests.raw_http2 import RawConnection

BODIES = 40
PER_CONNECTION = 1_000
STREAMS_PER_IDLE_CONNECTION = 60
BATCH = 100


async def front_door(target: Target, dose: Dose) -> Outcome:
    """Open `dose.count` streams of headers over the dose's time; keep up 40 bodies and a connection per 60 streams."""
    known = target.callers()
    unknown = [known["no key"], known["wrong key"]]
    callers = itertools.cycle(unknown)
    ways = [(target.address(FRONT), GENERATE, next(callers)) for _ in range(BODIES)]
    idle = Dose(dose.count // STREAMS_PER_IDLE_CONNECTION, dose.seconds)
    async with asyncio.TaskGroup() as group:
        parts = [
            group.create_task(bodies.send_all(ways, dose)),
            group.create_task(connections.idle(target, idle)),
            group.create_task(_headers(target, unknown, dose)),
        ]
    return merged(part.result() for part in parts)


async def _headers(target: Target, callers: list[Metadata], dose: Dose) -> Outcome:
    """Open streams at an even rate, on one connection after the other; all stay until the dose's time is over."""
    outcome = Outcome()
    began_s = time.monotonic()
    until_s = began_s + dose.seconds
    per_connection = min(PER_CONNECTION, dose.count // 4)
    count = dose.count // per_connection
    gap_s = dose.seconds / dose.count * BATCH

    async def one(number: int) -> None:
        await asyncio.sleep(max(0.0, began_s + number * dose.seconds / count - time.monotonic()))
        parts = open_headers(request_block(GENERATE, callers[number % len(callers)]), per_connection)
        with suppress(OSError, TimeoutError):
            async with RawConnection.connect(target.address(FRONT)) as connection:
                while batch := list(itertools.islice(parts, BATCH)):
                    outcome.did["streams"] += await connection.flood(batch)
                    await asyncio.sleep(gap_s)
                with suppress(TimeoutError):
                    await connection.closed(max(0.0, until_s - time.monotonic()))
                outcome.saw["answered"] += connection.frames["HeadersFrame"]

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
    return outcome


TOGETHER = Attack(
    name="front-door",
    about="Endless bodies, streams without a body and idle connections at once, without a key and with a wrong one",
    run=front_door,
    long=Dose(120_000, 60.0),
    short=None,
)
