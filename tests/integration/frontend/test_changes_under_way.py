"""Streams that break while the deadline estimate, a budget or the tenant's class changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256
from typing import Any

import grpc
import pytest

from kvmesh import config as configuration
from kvmesh.clock import wall_s
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.tenants.catalogue import Catalogue
from kvmesh.tenants.overrides import Override
from services.frontend.accounts.executions import execution_key
from services.frontend.accounts.progress_reports import PROGRESS_TOKENS
from services.frontend.requests import resume_token
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.surface import intake
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.integration.frontend.test_generate import PROMPT, request

TABLES: dict[str, Any] = {
    "classes": {
        "long": {"runtime_max_s": 60.0, "max_output_tokens": 4000},
        "quick": {"runtime_max_s": 30.0, "max_output_tokens": 20},
    },
    "tenants": {
        "free": {"class": "long"},
        "strict": {"class": "long", "tokens_per_min": 600, "tokens_burst": 1000, "strict": True},
    },
    "keys": {
        name: {"tenant": name, "sha256": sha256(f"kvm_{name}".encode()).hexdigest()}
        for name in ("free", "strict")
    },
}


@pytest.fixture
async def served(redis_url: str, pool: Pool) -> AsyncIterator[Serving]:
    """A frontend with tenants, Redis and one router."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend(redis_url, TABLES))
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made


class Stream:
    """A request of `tenant` with a stream that breaks and is resumed, as the client's library does."""

    def __init__(self, served: Serving, tenant: str, asked: pb.GenerateRequest) -> None:
        self.served = served
        self.metadata = (("authorization", f"Bearer kvm_{tenant}"),)
        self.asked = asked
        self.ids: list[int] = []
        self.token = b""
        self.started = pb.Started()
        self.finished: pb.Finished | None = None

    async def read(self, count: int = 1 << 30, timeout_s: float = 20.0, *, cut: bool = True) -> None:
        """Send the request, read until `count` tokens or the end, then break the stream in the way that `cut` says."""
        message = pb.GenerateRequest()
        message.CopyFrom(self.asked)
        if self.token:
            message.options.resume.resume_token = self.token
            message.options.resume.received_token_ids.extend(self.ids)
        call = self.served.stub.Generate(message, metadata=self.metadata, timeout=timeout_s)
        async for each in call:
            self.token = each.started.resume_token or each.tokens.resume_token or self.token
            self.ids += each.tokens.ids
            if each.HasField("started"):
                self.started = each.started
            if each.HasField("finished"):
                self.finished = each.finished
            if len(self.ids) >= count:
                break
        if cut:
            call.cancel()


async def test_a_takeover_does_not_lower_the_limit_again(served: Serving, pool: Pool) -> None:
    """The request runs to the limit that its first frontend announced, even if that may miss the deadline."""
    pool.tokens_max = 30
    stream = Stream(served, "free", request(200))
    await stream.read(20, cut=False)
    (peer,) = served.frontend.core.peers
    peer.step_s = 0.1
    pool.tokens_max = 1 << 30
    await stream.read(timeout_s=10.0)
    assert (stream.started.max_output_tokens, stream.started.is_output_clamped) == (200, False)
    assert stream.finished is not None and stream.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert stream.ids == oracle(PROMPT, 200)


async def test_a_stream_that_breaks_twice_continues_at_its_tenants_limit(served: Serving, pool: Pool) -> None:
    """The first message of the second stream names the running attempt, so the takeover goes ahead of the limits."""
    stream = Stream(served, "strict", request(500, idempotency_key="k"))
    await stream.read(10)
    await served.until_empty()
    await stream.read(0)
    location = resume_token.unpack(stream.token, served.frontend.seal).location
    assert location is not None and location.decode_replica == "decode-0"
    await served.until_empty()
    await until(lambda: not served.frontend.accounts.budgets.open_count, "settled")
    rest = Stream(served, "strict", request(700))
    await rest.read(1, cut=False)  # all tokens of the tenant
    await stream.read(len(stream.ids) + 5)
    assert stream.ids == oracle(PROMPT, 500)[: len(stream.ids)]


async def test_progress_of_a_named_request_is_reported_to_redis(served: Serving, pool: Pool) -> None:
    """While the request runs within its estimate: after a kill the next execution knows the delivered output of this
    one.
    """
    stream = Stream(served, "strict", request(700, idempotency_key="k"))
    await stream.read(PROGRESS_TOKENS + FLOW_CONTROL_WINDOW, cut=False)
    redis, key = (
        served.frontend.accounts.executions._redis,
        execution_key("kvmesh", stream.started.request_id),
    )

    async def note() -> int:
        names = [name for name in await redis.execute("HKEYS", key) if name.startswith(b"given:")]
        return int(await redis.execute("HGET", key, names[0])) if names else 0

    while not (given := await note()):
        await asyncio.sleep(0.01)
    assert PROGRESS_TOKENS <= given <= 700
    await stream.read(len(stream.ids) + 1)  # another execution takes it over, and its client leaves
    await served.until_empty()
    assert await served.frontend.accounts.settlements.flush(5)
    assert not await note(), "one that has reported needs no note"


@pytest.mark.parametrize("is_dated", [True, False])
async def test_a_token_older_than_its_record_is_no_way_around_the_limits(
    served: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch, *, is_dated: bool
) -> None:
    """An hour later no record proves the received output, and the tenant has used all its tokens: rejected.

    A token of the previous release, without a date, counts as old at once.
    """
    stream = Stream(served, "strict", request(500))
    await stream.read(10)
    token = resume_token.unpack(stream.token, served.frontend.seal)
    assert token.location is not None and 0 <= wall_s() - token.issued_s < 60
    await served.until_empty()
    await until(lambda: not served.frontend.accounts.budgets.open_count, "settled")
    rest = Stream(served, "strict", request(700))
    await rest.read(1, cut=False)  # all tokens of the tenant
    assert await served.frontend.accounts.settlements.flush(5)
    await served.frontend.accounts.executions._redis.execute("DEL", execution_key("kvmesh", token.request_id))
    if is_dated:
        monkeypatch.setattr(intake, "wall_s", lambda: wall_s() + 3600)
    else:
        stream.token = replace(token, issued_s=0).pack(served.frontend.seal)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read(20)
    assert from_rpc_error(caught.value).reason == "TOKEN_RATE_EXCEEDED"


@pytest.mark.parametrize("limit", [200, None])
async def test_a_stream_keeps_its_limit_when_its_tenant_gets_another_class(
    served: Serving, pool: Pool, limit: int | None
) -> None:
    """An operator's change applies to new requests: a lower limit of the class ends no stream."""
    asked = request(200)
    if limit is None:
        asked.limits.ClearField("max_output_tokens")
    stream = Stream(served, "free", asked)
    await stream.read(10)
    whole = stream.started.max_output_tokens
    tables = configuration.build({"frontend": {}, **TABLES})
    served.frontend.tenants.catalogue = Catalogue(tables, {"tenant:free": Override(1, {"class": "quick"})})
    await stream.read()
    assert stream.started.service_class == "quick" and stream.started.max_output_tokens == whole
    assert stream.ids == oracle(PROMPT, whole)
