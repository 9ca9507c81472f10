"""Slow readers: closed windows hold decode's slots, and resets before the last byte hide tokens from the charge."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.abuse.attack import GRPC_CODES, Attack, Bounds, Dose, Outcome
from tests.abuse.target import FRONT, GENERATE, QUIET, Target, bearer
from tests.integration.harness import until
from tests.raw_http2 import RawConnection, RawStream

PER_CONNECTION = 100
FLOW_CONTROL_WINDOW = 64
"""Most tokens charged to a client beyond those that left the process."""

PREFIX_BYTES = 5
CLOSED_S_MAX = 1.5
"""Longest time closed without doubt about the charge: from 2 s on, all computed tokens are charged."""


async def closed(target: Target, dose: Dose) -> Outcome:
    """Keep `dose.count` streams with closed windows; an ended stream is opened again after a second."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    metadata = bearer(target.key)
    block_size = min(PER_CONNECTION, dose.count)

    async def one(connection: RawConnection) -> None:
        while time.monotonic() < until_s and not connection.is_closed:
            stream = connection.call(GENERATE, metadata)
            outcome.did["streams"] += 1
            try:
                await stream.send_message(target.request(output_tokens=600))
                await stream.ended(max(0.0, until_s - time.monotonic()))
            except (TimeoutError, ConnectionError):
                pass
            outcome.saw["open" if stream.status is None else GRPC_CODES.get(stream.status, "?")] += 1
            if (left_s := until_s - time.monotonic()) > 0:
                await asyncio.sleep(min(1.0, left_s))

    async def connection_of(count: int) -> None:
        with suppress(OSError):
            async with (
                RawConnection.connect(target.address(FRONT), stream_window=0) as connection,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(count):
                    group.create_task(one(connection))

    async with asyncio.TaskGroup() as group:
        for _ in range(dose.count // block_size):
            group.create_task(connection_of(block_size))
    return outcome


async def unpaid(target: Target, dose: Dose) -> Outcome:
    """Read all but the last byte of the buffered data, then reset; compare the received and the charged tokens."""
    outcome = Outcome()
    before = await target.charged()
    gate = asyncio.Semaphore(16)
    tokens: list[int] = []
    late = 0

    async def one() -> None:
        nonlocal late
        async with gate, RawConnection.connect(target.address(QUIET), stream_window=0) as connection:
            stream = connection.call(GENERATE, bearer(target.key))
            await stream.send_message(target.request(output_tokens=200))
            outcome.did["requests"] += 1
            taken, closed_s = await _take(stream, target.rng.uniform(0.5, 0.9))
            stream.reset()
            await connection.drain()
            tokens.append(taken)
            late += closed_s > CLOSED_S_MAX

    async with asyncio.TaskGroup() as group:
        for _ in range(dose.count):
            group.create_task(one())
    await target.mesh.idle(30)
    received = sum(tokens)
    most = received + FLOW_CONTROL_WINDOW * len(tokens) + 200 * late
    charged = 0

    async def is_charged() -> bool:
        nonlocal charged
        charged = await target.charged() - before
        return charged >= received

    with suppress(AssertionError):
        await until(is_charged, 5, "the received tokens are charged", every_s=0.1)
    outcome.did["tokens received"] = received
    outcome.saw["tokens charged"] = charged
    if not received <= charged <= most:
        outcome.violations.append(
            f"{received} tokens were received and {charged} charged; at most {most} are right"
        )
    return outcome


async def _take(stream: RawStream, wait_s: float) -> tuple[int, float]:
    """Let tokens accumulate, then read their message except its last byte; return tokens, and time closed.

    Before that message come `started` and the message that gRPC held when the window closed: one token.
    """
    for count in (1, 2):
        await _read_prefix(stream)
        stream.grant(_length(stream))
        await _has_messages(stream, count)
    await asyncio.sleep(wait_s)  # this is the attack: a window that stays closed while tokens are computed
    # The message held now has one token again; the accumulated ones are behind it.
    began_s = time.monotonic() - wait_s
    await _read_prefix(stream)
    stream.grant(_length(stream))
    await _has_messages(stream, 3)
    await _read_prefix(stream)
    stream.grant(_length(stream) - 1)
    await stream.until(lambda: stream.window == 0)
    closed_s = time.monotonic() - began_s
    parse = pb.GenerateResponse.FromString
    messages = [*stream.decoded(parse), parse(bytes(stream.partial[PREFIX_BYTES:]) + b"\0")]
    return sum(len(message.tokens.ids) for message in messages), closed_s


async def _has_messages(stream: RawStream, count: int) -> None:
    await stream.until(lambda: len(stream.messages) == count)


async def _read_prefix(stream: RawStream) -> None:
    stream.grant(PREFIX_BYTES)
    await stream.until(lambda: len(stream.partial) == PREFIX_BYTES)
    if stream.has_ended:
        raise ConnectionError(f"the stream ended: {stream.status} {stream.message}")


def _length(stream: RawStream) -> int:
    return int.from_bytes(stream.partial[1:PREFIX_BYTES], "big")


CLOSED = Attack(
    name="closed-windows",
    about="Streams of a client that never reads, opened again whenever they are cut",
    run=closed,
    long=Dose(800, 60.0),
    short=Dose(100, 4.0),
    bounds=Bounds(answered=0.99, p99_s=10.0),
)
UNPAID = Attack(
    name="unpaid-tokens",
    about="Requests of a client that reads the buffered data except its last byte, and resets",
    run=unpaid,
    long=Dose(300, 10.0),
    short=Dose(24, 1.0),
)
