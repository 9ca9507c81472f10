"""Callers and their limits are those of Generate: the same reason refuses the same request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tritonclient.grpc import aio, service_pb2
from tritonclient.utils import InferenceServerException

from kvmesh.errors import from_rpc_error
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool, oracle
from tests.integration.frontend.test_generate import error_of, request
from tests.integration.frontend.test_kserve import PROMPT, Stream, final, raw, tokens
from tests.integration.frontend.test_tenants_wire import KEYS, call, served, until_settled

__all__ = ["served"]  # the fixture


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS.get(tenant, tenant)}"}


async def refused(serving: Serving, tenant: str, count: int) -> tuple[str, str]:
    """Return reason and text of the refusal of a request on a stream; the stream stays open."""
    stream = Stream(serving.channel, bearer(tenant).items())
    await stream.send(raw("r-1", tokens(count)))
    await stream.until_final("r-1")
    (only,) = stream.by_id["r-1"]
    await stream.call.done_writing()
    assert await stream.read() is None
    return only.infer_response.parameters["kvmesh_reason"].string_param, only.error_message


async def test_the_same_limits_refuse_with_the_same_reason(served: Serving, pool: Pool) -> None:
    """On a stream with the reason in front, and by a call with its status, too."""
    pool.hold_at = "queued"
    running = [call(served, request(4), "agents") for _ in range(4)]
    await until(lambda: len(pool.runs) == 4, "four run")
    for tenant, count in (("agents", 4), ("search", 51), ("batch", 2000)):
        wanted = from_rpc_error(await error_of(call(served, request(count), tenant)))
        reason, text = await refused(served, tenant, count)
        assert reason == wanted.reason
        assert text.startswith(f"{reason}: ")
        async with aio.InferenceServerClient(served.address) as client:
            with pytest.raises(InferenceServerException, match=f"{reason}: ") as caught:
                await client.infer("tensorrt_llm", tokens(count, streaming=False), headers=bearer(tenant))
            assert caught.value.status() == f"StatusCode.{wanted.code.name}"
    for each in running:
        each.cancel()
    await until_settled(served)


async def test_a_budget_is_reserved_told_and_given_back(served: Serving) -> None:
    """The last response has what is left; a spent budget refuses with the time of a retry."""
    stream = Stream(served.channel, bearer("batch").items())
    await stream.send(raw("a", tokens(800)))
    await stream.until_final("a")
    assert stream.ids("a") == oracle(PROMPT, 800)
    last = stream.by_id["a"][-1].infer_response.parameters
    assert 0 <= int(last["kvmesh_remaining_tokens"].string_param) < 900
    await stream.send(raw("b", tokens(800)))
    await stream.until_final("b")
    (refusal,) = stream.by_id["b"]
    assert refusal.error_message.startswith("TOKEN_RATE_EXCEEDED: ")
    assert 1000 < refusal.infer_response.parameters["retry_after_ms"].uint64_param < 12_000
    stream.call.cancel()
    await until_settled(served)


@pytest.mark.parametrize(
    ("tenant", "code"), [("kvm_nobody", "UNAUTHENTICATED"), ("off", "PERMISSION_DENIED")]
)
async def test_unknown_callers_are_refused_before_their_message(
    served: Serving, tenant: str, code: str
) -> None:
    """Every method but those of liveness refuses them with a status."""
    stream = Stream(served.channel, bearer(tenant).items())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code().name == code
    async with aio.InferenceServerClient(served.address) as client:
        assert await client.is_server_live()
        assert (await client.get_server_metadata()).name == "kvmesh"
        for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
            with pytest.raises(InferenceServerException):
                await ask("ensemble", headers=bearer(tenant))


async def test_a_request_may_name_its_tenant(served: Serving, pool: Pool) -> None:
    """By a parameter, under the rule of the metadata: only a gateway may name another one."""
    stream = Stream(served.channel, bearer("search").items())
    await stream.send(raw("own", tokens(2), tenant="search"), raw("other", tokens(2), tenant="agents"))
    await stream.until_final("own", "other")
    assert stream.ids("own") == oracle(PROMPT, 2)
    (other,) = stream.by_id["other"]
    assert other.error_message.startswith("TENANT_UNKNOWN: only a gateway may name another tenant")
    assert [submit.budget.tenant for submit in pool.submits] == ["search"]
    stream.call.cancel()


async def test_parameters_shape_the_request(served: Serving, pool: Pool) -> None:
    """Priority and session reach the router; a key makes a request idempotent."""
    stream = Stream(served.channel, bearer("free").items())
    first: Any = raw("a", tokens(3), session_id="s", idempotency_key="k")
    first.parameters["priority"].uint64_param = 1
    again = service_pb2.ModelInferRequest.FromString(first.SerializeToString())
    again.id = "b"
    await stream.send(first)
    await stream.until_final("a")
    await stream.send(again)
    await stream.until_final("b")
    seeds = [stream.by_id[id_][-1].infer_response.parameters["kvmesh_seed"].uint64_param for id_ in "ab"]
    assert seeds[0] == seeds[1]
    assert stream.ids("a") == stream.ids("b") == oracle(PROMPT, 3)
    assert all(final(stream.by_id[id_][-1].infer_response) for id_ in "ab")
    assert pool.submits[0].budget.priority == 100
    stream.call.cancel()
