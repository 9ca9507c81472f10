"""Bytes that violate HTTP/2, on the port of each role: frames, settings, header blocks, floods."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress

from tests.abuse.attack import Attack, Dose, Outcome
from tests.abuse.target import GENERATE, SERVICES, Target
from tests.raw_frames import (
    PREFACE,
    continuation_flood,
    headers_frames,
    ping_flood,
    request_block,
    settings_flood,
)

FLOOD_FRAMES = 5_000
FRAMES_MAX = 40
FRAME_TYPES = 12
_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


async def malformed(target: Target, dose: Dose) -> Outcome:
    """Open connections to each role in turn and send junk, until count and time are over."""
    outcome = Outcome()
    gate = asyncio.Semaphore(20)
    until_s = time.monotonic() + dose.seconds

    async def one(number: int) -> None:
        name, rng = SERVICES[number % len(SERVICES)], random.Random(target.rng.getrandbits(64))
        async with gate:
            await _send(target.address(name), _junk(number // len(SERVICES), rng), outcome)

    done = 0
    while done < dose.count or time.monotonic() < until_s:
        async with asyncio.TaskGroup() as group:
            for number in range(done, done + 100):
                group.create_task(one(number))
        done += 100
    return outcome


async def _send(address: str, parts: Iterator[bytes], outcome: Outcome) -> None:
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        outcome.saw["not connected"] += 1
        return
    outcome.did["connections"] += 1
    try:
        with suppress(OSError):
            for part in parts:
                writer.write(part)
                outcome.did["frames"] += 1
                if writer.transport.get_write_buffer_size() > 1 << 16:
                    await writer.drain()
            writer.write_eof()
        async with asyncio.timeout(2):
            while await reader.read(1 << 16):
                pass
        outcome.saw["closed"] += 1
    except TimeoutError:
        outcome.saw["open after 2 s"] += 1
    except OSError:
        outcome.saw["closed"] += 1
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


def _junk(number: int, rng: random.Random) -> Iterator[bytes]:
    """Return the bytes of one connection; `number` chooses the kind, one in twenty is a flood."""
    block = request_block(GENERATE)
    if number % 20 == 19:
        flood = number // 20 % 4
        yield PREFACE + _EMPTY_SETTINGS
        if flood == 0:
            yield from continuation_flood(block, FLOOD_FRAMES, rng.randbytes(rng.choice((0, 1, 50))))
        elif flood == 1:
            yield from ping_flood(FLOOD_FRAMES)
        elif flood == 2:
            yield from settings_flood(FLOOD_FRAMES)
        else:
            yield b"".join(one.serialize() for one in headers_frames(1, block))
            yield from (_frame(rng, 8, 1, rng.randbytes(4)) for _ in range(FLOOD_FRAMES))
        return
    match number % 5:
        case 0:
            yield rng.randbytes(rng.randint(1, 300))
        case 1:
            yield rng.choice(
                (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", PREFACE[: rng.randint(1, 23)])
            )
        case 2:
            yield PREFACE + _EMPTY_SETTINGS
            for _ in range(rng.randint(1, FRAMES_MAX)):
                size = rng.choice((0, 1, 4, 5, 8, 9, 200))
                yield _frame(
                    rng, rng.randrange(FRAME_TYPES), rng.choice((0, 1, 2, 3, 2**31 - 1)), rng.randbytes(size)
                )
        case 3:
            yield PREFACE + _EMPTY_SETTINGS
            yield _frame(rng, 1, 1, rng.randbytes(rng.randint(1, 400)), flags=rng.choice((4, 5, 0, 44)))
        case _:
            yield PREFACE + _EMPTY_SETTINGS
            opening = bytearray(b"".join(one.serialize() for one in headers_frames(1, block)))
            for _ in range(rng.randint(1, 6)):
                opening[rng.randrange(len(opening))] = rng.randrange(256)
            yield bytes(opening) + rng.randbytes(rng.randint(0, 100))


def _frame(rng: random.Random, kind: int, stream: int, payload: bytes, flags: int | None = None) -> bytes:
    """Return a frame, sometimes with a false length."""
    length = len(payload) if rng.random() < 0.9 else rng.randrange(1 << 24)
    marks = rng.randrange(256) if flags is None else flags
    return length.to_bytes(3, "big") + bytes((kind, marks)) + stream.to_bytes(4, "big") + payload


FRAMES = Attack(
    name="malformed-frames",
    about="Connections to the port of each role with junk, broken frames and header blocks, and floods of small frames",
    run=malformed,
    long=Dose(4_000, 15.0),
    short=Dose(200, 1.0),
)
