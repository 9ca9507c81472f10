"""Thousands of calls at once by stock clients: each is served, or refused with RetryInfo."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvmesh import errors
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.target import FRONT, Target, bearer

CHANNELS = 10
DEADLINE_S = 60.0


async def burst(target: Target, dose: Dose) -> Outcome:
    """Send `dose.count` calls at once over ten channels of grpcio."""
    outcome = Outcome()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(target.address(FRONT), options=options) for _ in range(CHANNELS)]
    stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    metadata = bearer(target.key)
    requests = [
        pb.GenerateRequest.FromString(target.request(prompt_tokens=20, output_tokens=16))
        for _ in range(min(dose.count, 500))
    ]

    async def one(number: int) -> None:
        call = stubs[number % CHANNELS].Generate(
            requests[number % len(requests)], metadata=metadata, timeout=DEADLINE_S
        )
        outcome.did["calls"] += 1
        try:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                pass
            code = await call.code()
            outcome.saw[code.name] += 1
        except grpc.aio.AioRpcError as error:
            _note(error, outcome)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            outcome.saw["CANCELLED"] += 1
            _wrong(outcome, "CANCELLED without details")

    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        async with asyncio.TaskGroup() as group:
            for number in range(dose.count):
                group.create_task(one(number))
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels))
    if outcome.saw["OK"] == 0:
        outcome.violations.append("none of the calls was served")
    return outcome


def _note(error: grpc.aio.AioRpcError, outcome: Outcome) -> None:
    details = errors.from_rpc_error(error)
    name = f"{details.code.name} {details.reason}".strip()
    outcome.saw[name] += 1
    if details.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        _wrong(outcome, f"{name}: {details.message[:100]}")
    elif details.retry_after_s is None:
        _wrong(outcome, f"{name} without RetryInfo")


def _wrong(outcome: Outcome, what: str) -> None:
    """Record each kind of wrong refusal once."""
    if (violation := f"a refusal was {what}") not in outcome.violations:
        outcome.violations.append(violation)


BURST = Attack(
    name="burst",
    about="Simultaneous calls by stock grpcio over ten channels",
    run=burst,
    long=Dose(10_000, 60.0),
    short=Dose(250, 4.0),
    bounds=Bounds(refusals=("LIVE_REQUESTS_FULL", "QUEUE_FULL"), p99_s=10.0),
)
