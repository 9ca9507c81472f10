"""Graceful shutdown of a frontend: clients that can move are moved soon, the others are served until the drain ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest
from msgspec.structs import replace

from kvmesh.client import Client, RetryPolicy
from kvmesh.clock import MonotonicClock
from kvmesh.errors import from_rpc_error
from kvmesh.server import BATCHED
from services.frontend.assembly import Frontend
from services.frontend.draining import drain
from services.frontend.surface.intake import HANDOVER_METADATA
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool
from tests.integration.generation import token_request
from tests.patience import quiet_s, wait_for

MOVES = ((HANDOVER_METADATA, "1"),)

QUICK: Final = RetryPolicy(probe_after_s=0.1, probe_timeout_s=0.4)
"""A client that checks a silent frontend soon."""


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


@asynccontextmanager
async def draining_beside_another(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A drain of `frontend` that has sent its clients on."""
    frontend.on_members([replace(frontend.member("127.0.0.1:1"), process_id="frontend-1")])
    sent, send = asyncio.Event(), frontend.server.send_clients_on

    def observed() -> None:
        send()
        sent.set()

    monkeypatch.setattr(frontend.server, "send_clients_on", observed)
    draining = asyncio.create_task(frontend.drain())
    await wait_for(sent.wait(), 10)
    yield
    await wait_for(draining, 10)
    assert frontend.server.is_open


async def test_new_calls_leave_the_connection_of_a_stream_that_stays(
    serving: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a load balancer such a client reaches another frontend. Its stream runs on here to its end."""
    plain = await begin(serving, pool, moves=False)
    async with draining_beside_another(serving.frontend, monkeypatch):
        if serving.frontend.options.config.frontend.edge == BATCHED:
            await until(lambda: connections_that_drain(serving.frontend) == 1, "the client has read GOAWAY")
        refused = serving.stub.Generate(token_request([5] * 20, max_output_tokens=50), timeout=20)
        assert await ends(refused) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        if serving.frontend.options.config.frontend.edge == BATCHED:
            assert len(connections(serving.frontend)) == 2, "the refused call took a new connection"
        pool.tokens_max = 1 << 30
        assert await ends(plain) == (grpc.StatusCode.OK, "")


def connections(frontend: Frontend) -> list[Any]:
    """Return the open connections of a batched server."""
    server: Any = frontend.server.grpc
    return list(server._connections)


def connections_that_drain(frontend: Frontend) -> int:
    return sum(each.is_draining and each._announcing is None for each in connections(frontend))


async def test_a_waiting_request_of_a_client_with_one_address_is_served(
    serving: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvmesh.client checks the health of a silent frontend by a new connection, which is taken."""
    pool.hold_at, pool.tokens_max = "queued", 1 << 30
    async with Client([serving.frontend.server.address], retry_policy=QUICK) as client:
        generation = client.send(token_request([5] * 20, max_output_tokens=50), deadline_s=20)

        async def read() -> None:
            async for _ in generation:
                pass

        reading = asyncio.create_task(read())
        await until(lambda: len(serving.frontend.core.admitted.serving) == 1, "the request waits")
        async with draining_beside_another(serving.frontend, monkeypatch):
            done, _ = await asyncio.wait([reading], timeout=3 * (QUICK.probe_after_s + QUICK.probe_timeout_s))
            assert not done, "the client has left the frontend"
            pool.hold_at = ""
            await wait_for(reading, 10)
    assert (generation.resumes, len(generation.ids)) == (0, 50)


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
