"""The OpenAI surface on a whole mesh: the answers are those of Generate, and a cancel leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.generation import generate
from tests.integration.harness import Mesh, configure, until
from tests.integration.lent_mesh import LentMesh, lent_mesh

pytestmark = pytest.mark.mesh

BACK_S = 1.0
"""Time within which all resources of a request must be free, in seconds."""

REASONS = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_STOP_STRING: "stop"}


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """One process of each role."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01}, prefill={"replicas": 1}, decode={"replicas": 1}
    )
    with lent_mesh(config, tmp_path_factory.mktemp("mesh")) as made:
        yield made


@pytest.fixture
async def mesh(lent: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, complete and idle."""
    async with lent.lease() as mesh:
        yield mesh


def client(mesh: Mesh) -> openai.AsyncOpenAI:
    address = mesh.parts["frontend-0"].http_address
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)


def ids_of(choice: Any) -> list[int]:
    return list(getattr(choice, "token_ids", ()))


async def test_the_same_prompt_and_seed_give_the_same_answer(mesh: Mesh) -> None:
    """Ids, text, log-probabilities, usage and finish reason, whole and streamed, with and without a stop string."""
    for seed, stop in ((5, ()), (6, ("e",)), (7, ("th", "an"))):
        request = pb.GenerateRequest(
            text="hello mesh", sampling=pb.Sampling(seed=seed, temperature=0.7, top_k=50, stop=stop)
        )
        request.limits.max_output_tokens, request.options.logprobs = 24, True
        mine = await generate(mesh.client(), request)
        assert mine.finished is not None
        usage = mine.finished.usage
        asked: dict[str, Any] = {
            "model": "reference",
            "prompt": "hello mesh",
            "seed": seed,
            "temperature": 0.7,
            "max_tokens": 24,
            "stop": list(stop),
            "extra_body": {"top_k": 50, "return_token_ids": True},
        }
        async with client(mesh) as aio:
            whole = await aio.completions.create(**asked, logprobs=0)
            stream = await aio.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            chunks = [each async for each in stream]
        choice = whole.choices[0]
        assert (ids_of(choice), choice.text) == (mine.ids, mine.text)
        assert choice.finish_reason == REASONS[mine.finished.finish_reason]
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == len(mine.ids)
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            usage.prompt_token_count,
            usage.output_token_count,
        )
        parts = [each.choices[0] for each in chunks if each.choices]
        assert [token for part in parts for token in ids_of(part)] == mine.ids
        assert "".join(part.text for part in parts) == mine.text
        assert parts[-1].finish_reason == choice.finish_reason
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == usage.output_token_count


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_frees_the_cache(mesh: Mesh, streams: bool) -> None:
    async with client(mesh) as aio:
        create: Any = aio.completions.create
        running = asyncio.ensure_future(
            create(model="reference", prompt=[70, 71] * 40, max_tokens=3900, stream=streams)
        )
        await until(lambda: decodes(mesh), 10, "it decodes")
        if streams:
            await (await running).close()
        else:
            running.cancel()
            await asyncio.wait((running,))
        await mesh.idle(BACK_S)


async def decodes(mesh: Mesh) -> bool:
    return bool((await mesh.status("decode-0")).engine_call_count)
