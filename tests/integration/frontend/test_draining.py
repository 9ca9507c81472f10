"""Graceful shutdown of a frontend: clients that can move are moved soon, the others are served until the drain ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from msgspec.structs import replace

from kvmesh.clock import MonotonicClock
from kvmesh.errors import from_rpc_error
from services.frontend.draining import CHECK_INTERVAL_S, NEWS_S, drain
from services.frontend.surface.intake import HANDOVER_METADATA
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool
from tests.integration.generation import token_request
from tests.patience import quiet_s, wait_for

MOVES = ((HANDOVER_METADATA, "1"),)


async def begin(serving: Serving, pool: Pool, *, moves: bool) -> Any:
    """Start a stream that has tokens and does not end; `moves`: the client can continue at another frontend."""
    pool.tokens_max = 5
    metadata = MOVES if moves else None
    call = serving.stub.Generate(token_request([5] * 20, max_output_tokens=50), metadata=metadata, timeout=20)
    for _ in range(2):
        await call.read()
    return call


async def ends(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the end of a stream."""
    try:
        while await call.read():
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error).reason
    return await call.code(), ""


async def test_movable_streams_end_soon_and_the_others_at_the_end(serving: Serving, pool: Pool) -> None:
    """Both get UNAVAILABLE with reason DRAINING; their attempts keep running for a takeover."""
    movable, plain = await begin(serving, pool, moves=True), await begin(serving, pool, moves=False)
    core = serving.frontend.core
    others: list[str] = []
    draining = asyncio.create_task(drain(core, MonotonicClock(), lambda: bool(others), 3.0))
    await until(lambda: core.is_draining, "the drain has begun")
    assert len(core.admitted.serving) == 2, "there is no other frontend: all streams stay"
    began_s = quiet_s()
    others.append("frontend-1")
    assert await ends(movable) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert quiet_s() - began_s < 2.5 and len(core.admitted.serving) == 1
    assert await ends(plain) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await draining
    assert pool.cancels == [] and len(pool.runs) == 2


async def test_a_stream_may_finish_during_the_drain(serving: Serving, pool: Pool) -> None:
    """A client that cannot move has the full time of the drain."""
    plain = await begin(serving, pool, moves=False)
    draining = asyncio.create_task(drain(serving.frontend.core, MonotonicClock(), lambda: True, 30.0))
    pool.tokens_max = 1 << 30
    assert await ends(plain) == (grpc.StatusCode.OK, "")
    await wait_for(draining, 10)


async def test_new_calls_leave_the_connection_of_a_stream_that_stays(serving: Serving, pool: Pool) -> None:
    """Behind a load balancer such a client reaches another frontend, while its stream runs on here."""
    frontend = serving.frontend
    plain = await begin(serving, pool, moves=False)
    frontend.on_members([replace(frontend.member("127.0.0.1:1"), process_id="frontend-1")])
    draining = asyncio.create_task(frontend.drain())
    await until(lambda: not frontend.server.is_open, "the listener is closed")
    refused = serving.stub.Generate(token_request([5] * 20, max_output_tokens=50), timeout=20)
    assert await ends(refused) == (grpc.StatusCode.UNAVAILABLE, "")
    pool.tokens_max = 1 << 30
    assert await ends(plain) == (grpc.StatusCode.OK, "")
    await wait_for(draining, 10)


async def test_a_waiting_request_that_could_move_keeps_its_connection(serving: Serving, pool: Pool) -> None:
    """Its client checks the health of a silent frontend, and would give its position in the queue up."""
    core, closings = serving.frontend.core, list[str]()

    async def close() -> None:
        closings.append("closed")

    pool.hold_at, pool.tokens_max = "queued", 5
    call = serving.stub.Generate(token_request([5] * 20, max_output_tokens=50), metadata=MOVES, timeout=20)
    await until(lambda: len(core.admitted.serving) == 1, "the request waits")
    draining = asyncio.create_task(drain(core, MonotonicClock(), lambda: True, 30.0, close))
    done, _ = await asyncio.wait([draining], timeout=NEWS_S + 4 * CHECK_INTERVAL_S)
    assert not done and not closings
    pool.hold_at = ""
    assert await ends(call) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await wait_for(draining, 10)
    assert closings == ["closed"]


async def test_a_drain_waits_for_a_client_that_still_reads(serving: Serving) -> None:
    """The request has ended, and its remaining output is still being written."""
    core: Any = serving.frontend.core
    reading = object()
    core.admitted.attend(reading)
    draining = asyncio.create_task(drain(core, MonotonicClock(), lambda: True, 30.0))
    await until(lambda: core.is_draining, "the drain has begun")
    done, _ = await asyncio.wait([draining], timeout=0.3)
    assert not done
    core.admitted.dismiss(reading, 0.0)
    await wait_for(draining, 5)
