"""Well-formed HTTP/2 with invalid gRPC: messages, lengths, flags and metadata, on Generate and on Attach."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from google.rpc import error_details_pb2, status_pb2

from kvmesh.attach.v1 import attach_pb2
from kvmesh.errors import DOMAIN
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.abuse.attack import GRPC_CODES, Attack, Dose, Outcome
from tests.abuse.target import ATTACH, FRONT, GENERATE, Target, bearer
from tests.raw_frames import Metadata, framed
from tests.raw_http2 import RawConnection, RawStream

BUGS = ("INTERNAL", "UNKNOWN")
"""Codes that the mesh itself must not return for junk. gRPC's own INTERNAL for an invalid body has no ErrorInfo of ours."""

ANSWER_S = 2.0
"""Deadline of a call; some bodies never end."""

TOGETHER = 20
"""Calls on one connection."""

WORKERS = 4
"""Connections at a time."""


async def generate(target: Target, dose: Dose) -> Outcome:
    """Send junk as requests, with a right key."""
    metadata = bearer(target.key)

    async def one(connection: RawConnection, rng: random.Random) -> RawStream:
        stream = connection.call(GENERATE, metadata, deadline_s=ANSWER_S)
        await stream.send_data(_request(target, rng), end=rng.random() < 0.95)
        return stream

    return await _many(target, [target.address(FRONT)], one, dose)


async def metadata(target: Target, dose: Dose) -> Outcome:
    """Send valid requests with junk as headers, keys, tenants, idempotency keys and resume tokens."""

    async def one(connection: RawConnection, rng: random.Random) -> RawStream:
        request = pb.GenerateRequest.FromString(target.request(output_tokens=2))
        given = _metadata(target, rng, request)
        stream = connection.call(GENERATE, given, deadline_s=ANSWER_S)
        await stream.send_message(request.SerializeToString())
        return stream

    return await _many(target, [target.address(FRONT)], one, dose)


async def attach(target: Target, dose: Dose) -> Outcome:
    """Send junk to the ports that services attach to: bytes, and imitated messages of a service."""
    addresses = [target.address(name) for name in ("router-0", "prefill-0", "decode-0")]

    async def one(connection: RawConnection, rng: random.Random) -> RawStream:
        stream = connection.call(ATTACH, deadline_s=ANSWER_S)
        for body in _attachment(target, rng):
            await stream.send_data(body)
        await stream.send_data(b"", end=True)
        return stream

    return await _many(target, addresses, one, dose)


Sender = Callable[[RawConnection, random.Random], Awaitable[RawStream]]


async def _many(target: Target, addresses: Sequence[str], send: Sender, dose: Dose) -> Outcome:
    """Let `send` open calls on connections to `addresses` in turn, until count and time are over."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds

    async def batches(worker: int) -> None:
        turn = worker
        while outcome.did["calls"] < dose.count or time.monotonic() < until_s:
            address = addresses[turn % len(addresses)]
            turn += 1
            async with (
                RawConnection.connect(address, connection_window=1 << 24) as connection,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(TOGETHER):
                    outcome.did["calls"] += 1
                    rng = random.Random(target.rng.getrandbits(64))
                    group.create_task(_one(connection, send, rng, outcome))

    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(batches(worker))
    return outcome


async def _one(connection: RawConnection, send: Sender, rng: random.Random, outcome: Outcome) -> None:
    stream = None
    with suppress(ConnectionError, TimeoutError):
        stream = await send(connection, rng)
        await stream.ended(ANSWER_S + 5)
    if stream is None or stream.status is None:
        outcome.saw["reset" if connection.is_closed or stream is None or stream.has_ended else "open"] += 1
        return
    code = GRPC_CODES.get(stream.status, str(stream.status))
    outcome.saw[code] += 1
    if code in BUGS and (code == "UNKNOWN" or _is_ours(stream)):
        violation = f"junk was answered with {code}: {stream.message[:150]}"
        if violation not in outcome.violations:
            outcome.violations.append(violation)


def _is_ours(stream: RawStream) -> bool:
    """Return whether the mesh ended the call, rather than gRPC below it."""
    info = error_details_pb2.ErrorInfo()
    details = status_pb2.Status.FromString(stream.details).details
    return any(detail.Unpack(info) and info.domain == DOMAIN for detail in details)


def _request(target: Target, rng: random.Random) -> bytes:
    """Return an invalid body of a call of Generate."""
    good = target.request(output_tokens=2)
    match rng.randrange(9):
        case 0:
            return framed(rng.randbytes(rng.randint(0, 500)))
        case 1:
            return framed(good, length=rng.choice((0, 1, len(good) - 1, len(good) + 1, 2**31, 2**32 - 1)))
        case 2:
            return framed(good, flag=rng.choice((1, 2, 255)))
        case 3:
            return framed(good) * rng.randint(2, 20)
        case 4:
            return rng.randbytes(rng.randint(0, 200))
        case 5:
            return framed(b"\x0a\xff\xff\xff\xff\x7f" + good)
        case 6:
            return framed(b"\x0a\x04\xff\xfe\xfd\xfc")  # a text that is no UTF-8
        case 7:
            request = pb.GenerateRequest.FromString(good)
            request.tokens.ids.extend(rng.choices((-1, 2**31 - 1, -(2**31), 5000), k=rng.randint(1, 50_000)))
            return framed(request.SerializeToString())
        case _:
            spoilt = bytearray(good)
            for _ in range(rng.randint(1, 8)):
                spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
            return framed(bytes(spoilt))


def _metadata(target: Target, rng: random.Random, request: pb.GenerateRequest) -> Metadata:
    """Return metadata. Junk for the idempotency key, the resume token or the session goes into `request`."""
    key = bearer(target.key)
    junk = "".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(1, 3000)))
    match rng.randrange(10):
        case 0:
            return (("authorization", junk),)
        case 1:
            return (("authorization", f"Bearer {junk}"), ("authorization", junk))
        case 2:
            return (*key, ("kvmesh-tenant", junk))
        case 3:
            return (*key, ("traceparent", junk), ("tracestate", junk), ("baggage", junk))
        case 4:
            return (*key, ("some-bin", rng.randbytes(rng.randint(0, 4000))), ("kvmesh-hand-over", junk))
        case 5:
            return (*key, *((f"x-{number}", junk[:100]) for number in range(rng.randint(1, 60))))
        case 6:
            return (*key, ("x-huge", "h" * rng.choice((7_000, 12_000, 16_000, 60_000))))
        case 7:
            request.idempotency_key = rng.choice((junk, "\x00\x01\x02", "é" * 100, "k" * 128, "k" * 129))
            return key
        case 8:
            request.options.resume.resume_token = rng.randbytes(rng.choice((0, 1, 16, 64, 5_000)))
            request.options.resume.received_token_ids.extend(
                rng.choices(range(-5, 5000), k=rng.randint(0, 300))
            )
            return key
        case _:
            request.session_id = junk
            request.model = rng.choice(("", junk))
            return (*key, ("grpc-encoding", junk[:20]), ("grpc-accept-encoding", junk[:50]))


def _attachment(target: Target, rng: random.Random) -> list[bytes]:
    """Return the body of an Attach, in pieces."""
    if rng.random() < 0.3:
        return [framed(rng.randbytes(rng.randint(1, 300)), flag=rng.choice((0, 0, 0, 1, 7)))]
    hello = attach_pb2.AttachRequest()
    hello.hello.process_id = rng.choice(("frontend-0", "router-0", "", "x" * 10_000, "\x00"))
    hello.hello.boot_id = rng.choice(("", "0" * 16, "b" * 5_000))
    hello.hello.protocol_version = rng.choice((0, 1, 1, 1, 2**32 - 1))
    messages = [hello, *(_attach_message(rng) for _ in range(rng.randint(1, 10)))]
    if rng.random() < 0.3:
        rng.shuffle(messages)
    return [framed(message.SerializeToString()) for message in messages]


def _attach_message(rng: random.Random) -> attach_pb2.AttachRequest:
    """Return a message with fields of the right types and of any value."""
    message = attach_pb2.AttachRequest()

    def number() -> int:
        return rng.choice((0, 1, 2, 7, 2**16, 2**31, 2**32 - 1))

    def name() -> str:
        return rng.choice(("", "0" * 32, "f" * 32, "decode-0", "é" * 40, "x" * 3_000))

    for _ in range(rng.randint(0, 3)):
        submit = message.submits.add(
            slot=number(), request_id=name(), attempt=number(), start_position=number()
        )
        submit.token_ids = rng.randbytes(rng.choice((0, 1, 4, 40, 4_001)))
        submit.block_hashes = rng.randbytes(rng.choice((0, 7, 8, 80)))
        submit.block_tokens = number()
        submit.phase = rng.choice((0, 1, 2, 3, 9))  # type: ignore[assignment]  # 9 is no phase
        submit.sampling.temperature = rng.choice((0.0, -1.0, float("nan"), float("inf")))
        submit.credit_position, submit.end_token_id = number(), rng.choice((-(2**31), -1, 5))
        submit.model_version, submit.traceparent, submit.session_id = name(), name(), name()
        submit.budget.remaining_ms = rng.choice((0, 1, 500, 2**32 - 1))
        submit.budget.max_output_tokens = number()
        submit.budget.attempt, submit.budget.attempts_max = number(), number()
    for _ in range(rng.randint(0, 2)):
        message.cancels.add(slot=number(), reason=rng.choice((0, 1, 5, 99)))
        message.adopts.add(
            slot=number(), request_id=name(), attempt=number(), position=number(), decode_replica=name()
        )
        message.handoffs.add(slot=number(), context_phase_params=rng.randbytes(50), kv_address=name())
    message.credit_slots.extend(number() for _ in range(rng.randint(0, 5)))
    message.credit_positions.extend(number() for _ in range(rng.randint(0, 5)))
    return message


MESSAGES = Attack(
    name="junk-requests",
    about="Calls of Generate with a right key and a body that is no valid request",
    run=generate,
    long=Dose(4_000, 15.0),
    short=Dose(200, 1.0),
)
METADATA = Attack(
    name="junk-metadata",
    about="Calls of Generate with junk as key, tenant, trace, idempotency key, resume token and other metadata",
    run=metadata,
    long=Dose(4_000, 15.0),
    short=Dose(200, 1.0),
)
ATTACH_JUNK = Attack(
    name="junk-attach",
    about="Streams to the ports that services attach to, with junk and with imitated messages of a service",
    run=attach,
    long=Dose(3_000, 15.0),
    short=Dose(150, 1.0),
)
