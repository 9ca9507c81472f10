"""Attacks on the HTTP port of a frontend: floods and slow clients (slowloris) of HTTP/1.1."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvmesh.tenants.minting import mint
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.attacks.connections import AT_ONCE, IDLE_AFTER_MB, IDLE_PEAK_MB, hold
from tests.abuse.target import FRONT, Target
from tests.raw_http1 import Client, connected, get, post

CHAT = "/v1/chat/completions"
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
BODY_BYTES = 64 << 20
PIECE = b" " * (64 << 10)
DRIP_S = 0.2
"""Time between the bytes of a slow client."""

RECEIVE_BUFFER = 4_096
HOLD_S = 40.0
"""Time for which a slow reader reads nothing, longer than `decode.slow_reader_s`. Then it looks at its stream."""

BACK_S = 0.1
"""Pause of a client that was not connected."""

Pieces = Callable[[int], Iterator[bytes]]
"""Bytes of the connection with a number, endless or not."""


async def idle(target: Target, dose: Dose) -> Outcome:
    """Open connections. A third is silent, a third sends half a header, a third has had a response."""
    return await hold(_address(target), [b"", HEAD, get("/health")], dose)


async def headers(target: Target, dose: Dose) -> Outcome:
    """Send headers a byte at a time, and come again after each refusal."""
    return await _visits(target, dose, lambda _: itertools.chain([HEAD], itertools.repeat(b"a")), DRIP_S)


async def bodies(target: Target, dose: Dose) -> Outcome:
    """Send bodies of 64 MB with a length and without one. A third of the clients has no key, a third a wrong one."""

    def pieces(number: int) -> Iterator[bytes]:
        yield (_start if number % 2 else _chunked)(target, number)
        piece = PIECE if number % 2 else b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
        yield from itertools.repeat(piece, BODY_BYTES // len(PIECE))

    return await _visits(target, dose, pieces, 0.0)


async def slow_bodies(target: Target, dose: Dose) -> Outcome:
    """Send bodies a byte at a time, with the keys of `bodies`."""
    return await _visits(
        target,
        dose,
        lambda number: itertools.chain([_start(target, number)], itertools.repeat(b" ")),
        DRIP_S,
    )


async def bombs(target: Target, dose: Dose) -> Outcome:
    """Send endless paths, headers, names, many headers, and endless trailers."""
    kinds = [
        (b"GET /", b"a" * 4_096),
        (HEAD + b"a: ", b"a" * 4_096),
        (HEAD, b"a" * 4_096),
        (HEAD, b"a:b\r\n" * 1_000),
        (b"", b"\r\n" * 2_000),
    ]

    def pieces(number: int) -> Iterator[bytes]:
        kind = number % (len(kinds) + 1)
        start, piece = (
            kinds[kind] if kind < len(kinds) else (_chunked(target, 2) + b"0\r\n", b"a:b\r\n" * 1_000)
        )
        return itertools.chain([start], itertools.repeat(piece, 4_096))

    return await _visits(target, dose, pieces, 0.0)


async def pipelines(target: Target, dose: Dose) -> Outcome:
    """Send requests without a wait for their responses: cheap ones, refused ones, and ones for the model."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).encode()
    kinds = [get("/health") * 200, get("/no") * 200, post(CHAT, body, _key(target.key)) * 20]

    def pieces(number: int) -> Iterator[bytes]:
        return itertools.repeat(kinds[number % len(kinds)], 1_000)

    return await _visits(target, dose, pieces, 0.0, to_the_end=True)


async def junk(target: Target, dose: Dose) -> Outcome:
    """Send requests with some bytes changed, cut or doubled."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).encode()
    whole = [
        post(CHAT, body, _key(target.key)),
        _chunked(target, 2) + b"%x\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(body), body),
        get("/v1/models", _key(target.key)),
    ]
    rng = random.Random(target.rng.getrandbits(64))

    def pieces(number: int) -> Iterator[bytes]:
        data = bytearray(whole[number % len(whole)])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 40)]
                    data += b"x"
                case 2:
                    data[at:at] = data[max(0, at - rng.randint(1, 60)) : at]
                case _:
                    data[at:at] = rng.choice((b"\0", b"\n", b"\r\n", b" ", b":", b"\xff", b"0", b"\r\n\r\n"))
        yield bytes(data)

    return await _visits(target, dose, pieces, 0.0, leaves=True)


async def readers(target: Target, dose: Dose) -> Outcome:
    """Keep up `dose.count` streams of events that are not read."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds

    async def one(number: int) -> None:
        body = {"prompt": [16 + number, 17], "max_tokens": 600, "stream": True, "return_token_ids": True}
        request = post("/v1/completions", json.dumps(body).encode(), _key(target.key))
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                client = await connected(_address(target), RECEIVE_BUFFER)
            except OSError:
                outcome.saw["not connected"] += 1
                await asyncio.sleep(BACK_S)
                continue
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of the reading half
            client.send(request)
            outcome.did["streams"] += 1
            await asyncio.sleep(min(HOLD_S, left_s))
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # of the reading half
            outcome.saw[await _seen(client)] += 1
            await _leave(client)

    async with asyncio.TaskGroup() as group:
        for number in range(dose.count):
            group.create_task(one(number))
    return outcome


async def _seen(client: Client) -> str:
    """Return what became of a stream that was not read."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1):
            while data := await client.reader.read(1 << 16):
                client.received += data
    if not client.received.startswith(b"HTTP/1.1 200"):
        return _status(bytes(client.received))
    if b"SLOW_READER" in client.received:
        return "SLOW_READER"
    return "whole" if b"[DONE]" in client.received else "cut"


async def _visits(
    target: Target,
    dose: Dose,
    pieces: Pieces,
    gap_s: float,
    *,
    to_the_end: bool = False,
    leaves: bool = False,
) -> Outcome:
    """Keep up `dose.count` connections that send `pieces`, one of them every `gap_s`, and open each again after its end.

    A client stops at its first response, or with `to_the_end` at the end of its connection. With `leaves` it waits for a
    response for a moment only.
    """
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    gate, numbers = asyncio.Semaphore(AT_ONCE), itertools.count()

    async def one() -> None:
        while time.monotonic() < until_s:
            try:
                async with gate:
                    client = await connected(_address(target))
            except OSError:
                outcome.saw["not connected"] += 1
                await asyncio.sleep(BACK_S)
                continue
            outcome.did["connections"] += 1
            answer = asyncio.create_task(_answer(client, to_the_end=to_the_end))
            try:
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    outcome.did["MB"] += await _send(client, pieces(next(numbers)), gap_s, answer)
                    seen = await asyncio.wait_for(answer, 1.0 if leaves else None)
                outcome.saw[seen] += 1
            except TimeoutError:
                outcome.saw["open"] += 1
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
                await _leave(client)

    async with asyncio.TaskGroup() as group:
        for _ in range(dose.count):
            group.create_task(one())
    outcome.did["MB"] //= 1_000_000
    return outcome


async def _send(client: Client, pieces: Iterator[bytes], gap_s: float, answer: asyncio.Task[str]) -> int:
    """Send `pieces` until the answer is there. Return their size."""
    size = 0
    with suppress(OSError):
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
            size += len(piece)
            if answer.done():
                break
            await asyncio.sleep(gap_s)
    return size


async def _answer(client: Client, *, to_the_end: bool) -> str:
    """Return the status of the first response."""
    first = b""
    with suppress(OSError):
        while data := await client.reader.read(1 << 16):
            first = first or data[:16]
            if not to_the_end:
                break
    return _status(first)


def _status(data: bytes) -> str:
    return data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.1 ") else "closed"


async def _leave(client: Client) -> None:
    client.writer.transport.abort()
    with suppress(OSError):
        await client.writer.wait_closed()


def _address(target: Target) -> str:
    return target.mesh.parts[FRONT].http_address


def _key(key: str) -> str:
    return f"Authorization: Bearer {key}"


def _keys(target: Target, number: int) -> list[str]:
    """Return the header with the key of a client: none, a wrong one, or the right one."""
    key = ("", mint(), target.key)[number % 3]
    return [_key(key)] if key else []


def _start(target: Target, number: int) -> bytes:
    """Return the head of a request whose body has 64 MB, or as much as is allowed if it is to be read."""
    size = BODY_BYTES if number % 4 == 1 else 4_000_000
    return post(CHAT, b"", *_keys(target, number)).replace(b"Length: 0", b"Length: %d" % size)


def _chunked(target: Target, number: int) -> bytes:
    """Return the head of a request whose body has no length."""
    return post(CHAT, b"", *_keys(target, number)).replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )


IDLE = Attack(
    name="http-idle",
    about="Idle connections to the HTTP port: silent, with half a header, or behind a response",
    run=idle,
    long=Dose(10_000, 15.0),
    short=Dose(300, 1.0),
    bounds=Bounds(peak_mb=IDLE_PEAK_MB, after_mb=IDLE_AFTER_MB),
)
HEADERS = Attack(
    name="http-slow-headers",
    about="Headers over HTTP that come a byte at a time, and never end",
    run=headers,
    long=Dose(1_000, 12.0),
    short=Dose(100, 1.0),
)
BODIES = Attack(
    name="http-bodies",
    about="Bodies of 64 MB over HTTP, with a length and without one; without a key, with a wrong and with a right one",
    run=bodies,
    long=Dose(40, 10.0),
    short=Dose(12, 1.0),
)
SLOW_BODIES = Attack(
    name="http-slow-bodies",
    about="Bodies over HTTP that come a byte at a time; without a key, with a wrong and with a right one",
    run=slow_bodies,
    long=Dose(150, 12.0),
    short=Dose(100, 1.0),
    # A third of the bodies has the key of the legitimate calls, and one tenant has at most half of the unread calls.
    # They take turns with it: a call waits for its own turn up to one second.
    bounds=Bounds(refusals=("CALLS_FULL",), p99_s=2.0),
)
BOMBS = Attack(
    name="http-header-bombs",
    about="Endless paths, headers, names of headers and trailers over HTTP",
    run=bombs,
    long=Dose(60, 6.0),
    short=Dose(24, 1.0),
)
PIPELINES = Attack(
    name="http-pipelines",
    about="Requests over HTTP without a wait for the responses before them (pipelining)",
    run=pipelines,
    long=Dose(40, 6.0),
    short=Dose(12, 0.5),
)
JUNK = Attack(
    name="http-junk",
    about="Requests over HTTP with bytes changed, cut and doubled",
    run=junk,
    long=Dose(40, 6.0),
    short=Dose(20, 0.5),
)
READERS = Attack(
    name="http-slow-readers",
    about="Streams of events over HTTP that are not read, opened again whenever they are cut",
    run=readers,
    long=Dose(200, 45.0),
    short=None,
    bounds=Bounds(answered=0.99, p99_s=10.0),
)
