"""KServe on a whole mesh: the answers are those of Generate, and a cancel leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tritonclient.grpc import aio, service_pb2

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.frontend.test_kserve import PROMPT, Stream, raw, tensor, text, tokens
from tests.integration.generation import generate
from tests.integration.harness import Mesh, configure, until
from tests.integration.lent_mesh import LentMesh, lent_mesh
from tests.raw_http2 import RawConnection, RawStream

pytestmark = pytest.mark.mesh

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
BACK_S = 1.0
"""Time within which all resources of a request must be free, in seconds."""


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """One process of each role."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01},
        prefill={"replicas": 1},
        decode={"replicas": 1, "slow_reader_s": 1.0},
    )
    with lent_mesh(config, tmp_path_factory.mktemp("mesh")) as made:
        yield made


@pytest.fixture
async def mesh(lent: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, complete and idle."""
    async with lent.lease() as mesh:
        yield mesh


def facts(response: Any) -> dict[str, Any]:
    found = response.parameters
    return {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in found.items()}


async def test_the_same_prompt_and_seed_give_the_same_answer(mesh: Mesh) -> None:
    """Ids, text, log-probabilities, usage and finish reason, by a call and by a stream."""
    request = pb.GenerateRequest(text="hello mesh", sampling=pb.Sampling(seed=5, temperature=0.7, top_k=50))
    request.limits.max_output_tokens, request.options.logprobs = 12, True
    mine = await generate(mesh.client(), request)
    assert mine.finished is not None and mine.started is not None
    sampling = [
        tensor("seed", "UINT64", [5]),
        tensor("temperature", "FP32", [0.7]),
        tensor("return_log_probs", "BOOL", [True]),
    ]
    wanted = {
        "kvmesh_seed": 5,
        "kvmesh_finish_reason": "length",
        "kvmesh_model_version": mine.started.model_version,
        "kvmesh_output_token_count": 12,
        "kvmesh_prompt_token_count": mine.finished.usage.prompt_token_count,
    }
    top_k = tensor("top_k", "INT32", [50])
    async with aio.InferenceServerClient(mesh.parts["frontend-0"].address) as client:
        whole = await client.infer("ensemble", [*text(12, stream=False), *sampling, top_k])
        assert whole.as_numpy("text_output")[0].decode() == mine.text
        assert facts(whole.get_response()).items() >= wanted.items()
        log_probs = whole.as_numpy("output_log_probs")
        assert log_probs.shape == (1, 1, 12)
        assert whole.as_numpy("cum_log_probs")[0, 0] == pytest.approx(log_probs.sum(), rel=1e-5)
    by_ids = pb.GenerateRequest.FromString(request.SerializeToString())
    by_ids.tokens.ids.extend(PROMPT)
    mine = await generate(mesh.client(), by_ids)
    stream = Stream(mesh.channel("frontend-0"))
    runtime_top_k = tensor("runtime_top_k", "INT32", [50])
    await stream.send(
        raw("text", [*text(12), *sampling, top_k], "ensemble"),
        raw("ids", [*tokens(12), *sampling, runtime_top_k]),
    )
    await stream.until_final("text", "ids")
    assert stream.ids("ids") == mine.ids
    said = b"".join(each.infer_response.raw_output_contents[0][4:] for each in stream.by_id["text"])
    assert said == whole.as_numpy("text_output")[0]
    assert facts(stream.by_id["text"][-1].infer_response).items() >= wanted.items()
    stream.call.cancel()


@pytest.mark.parametrize("way", ["stream", "call", "stop"])
async def test_a_cancel_frees_the_cache(mesh: Mesh, way: str) -> None:
    """A stream with several requests, a call of the stock client, and the input `stop` for one of them."""
    stream = Stream(mesh.channel("frontend-0"))
    async with aio.InferenceServerClient(mesh.parts["frontend-0"].address) as client:
        if way == "call":
            asking = client.infer("tensorrt_llm", tokens(4000, streaming=False))
            running = asyncio.create_task(asking)
            await until(lambda: decodes(mesh, 1), 10, "it decodes")
            running.cancel()
            await asyncio.wait((running,))
        else:
            await stream.send(*(raw("long", tokens(4000)) for _ in range(3)))
            await stream.read()
            await until(lambda: decodes(mesh, 3), 10, "all decode")
            if way == "stream":
                stream.call.cancel()
            else:
                await stream.send(raw("long", [*tokens(1), tensor("stop", "BOOL", [True])]))
        await mesh.idle(BACK_S)
    stream.call.cancel()


async def test_a_client_that_reads_nothing_loses_its_requests(mesh: Mesh) -> None:
    """They end as slow readers, or the whole stream does. A stream of another client has its whole answer meanwhile."""
    async with RawConnection.connect(mesh.parts["frontend-0"].address, stream_window=2000) as connection:
        stuck = connection.call(STREAM)
        for number in range(2):
            await stuck.send_message(raw(f"r-{number}", tokens(4000)).SerializeToString(), end=False)
        await until(lambda: decodes(mesh, 2), 10, "both decode")
        good = Stream(mesh.channel("frontend-0"))
        await good.send(raw("good", [*tokens(100), tensor("end_id", "INT32", [-1])]))
        await good.until_final("good")
        assert len(good.ids("good")) == 100
        good.call.cancel()
        await mesh.idle(20)
        stuck.grant(1 << 20)
        await stuck.until(lambda: sum(bool(each) for each in errors(stuck)) == 2 or stuck.has_ended)
        assert all(
            each.startswith("SLOW_READER: ") for each in (*filter(None, errors(stuck)), stuck.message) if each
        )


def errors(stream: RawStream) -> list[str]:
    found = stream.decoded(service_pb2.ModelStreamInferResponse.FromString)
    return [each.error_message for each in found]


async def decodes(mesh: Mesh, count: int) -> bool:
    return bool((await mesh.status("decode-0")).engine_call_count >= count)
