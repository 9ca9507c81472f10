"""Two models in two pools: a request stays with the model that it names, and clients learn what there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.snapshot.content import Content, PoolTrack, Track
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.test_generate import Answer, error_of, request
from tests.integration.frontend.test_pools import Mesh, mesh

__all__ = ["mesh"]  # the fixture

TABLES: Mapping[str, Any] = {
    "versions": {"v1": {"salt": "s"}, "v2": {"salt": "s", "model": "second"}},
    "pools": {"stable": {"version": "v1"}, "next": {"version": "v2"}},
}
CONTENT = Content((PoolTrack("stable", "v1", Track.STABLE, 100), PoolTrack("next", "v2")))


@asynccontextmanager
async def serving_both(mesh: Mesh, redis_url: str) -> AsyncIterator[Serving]:
    """A frontend of both models."""
    async with serving_frontend(redis_url, tables=TABLES) as made:
        made.frontend.core.take_snapshot(CONTENT)
        made.frontend.on_members(mesh.members())
        await made.until_up(len(mesh.addresses))
        yield made


def of_model(model: str, output: int = 6) -> pb.GenerateRequest:
    return request(output, model=model)


@pytest.mark.parametrize(("model", "pool"), [("", "stable"), ("reference", "stable"), ("second", "next")])
async def test_a_request_goes_to_the_pool_of_its_model(
    mesh: Mesh, redis_url: str, model: str, pool: str
) -> None:
    """Without a name it goes to the default model. Weights are those of the default model alone."""
    async with serving_both(mesh, redis_url) as serving:
        for _ in range(3):
            await Answer(serving.stub.Generate(of_model(model), timeout=20)).read()
        assert {name: len(each.submits) for name, each in mesh.pools.items()} == {
            name: 3 * (name == pool) for name in mesh.pools
        }


async def test_an_unknown_model_is_refused_with_the_names_that_exist(mesh: Mesh, redis_url: str) -> None:
    """By Generate and by GetModel."""
    async with serving_both(mesh, redis_url) as serving:
        error = await error_of(serving.stub.Generate(of_model("third"), timeout=20))
        assert "model is 'third'; empty or one of reference, second is allowed" in str(error)
        asked = serving.stub.GetModel(pb.GetModelRequest(model="third"), timeout=20)
        with pytest.raises(Exception, match="empty or one of reference, second"):
            await asked


async def test_a_key_of_another_model_is_refused(mesh: Mesh, redis_url: str) -> None:
    """The same prompt for another model is another request."""
    async with serving_both(mesh, redis_url) as serving:
        first, second = (of_model(model) for model in ("reference", "second"))
        first.idempotency_key = second.idempotency_key = "one-key"
        await Answer(serving.stub.Generate(first, timeout=20)).read()
        details = from_rpc_error(await error_of(serving.stub.Generate(second, timeout=20)))
        assert details.reason == "IDEMPOTENCY_KEY_REUSED"
        assert not mesh.pools["next"].submits


async def test_a_dead_pool_moves_no_request_to_another_model(mesh: Mesh, redis_url: str) -> None:
    """The other model's pool can place, and is not asked; the request goes on when its own pool is back."""
    async with serving_both(mesh, redis_url) as serving:
        mesh.pools["next"].hold_at = "queued"
        reading = asyncio.create_task(Answer(serving.stub.Generate(of_model("second"), timeout=20)).read())
        await until(lambda: len(mesh.pools["next"].submits) == 1, "a submit")
        await mesh.stop("next")
        serving.frontend.on_members(mesh.members())
        await asyncio.sleep(0)
        late = asyncio.create_task(Answer(serving.stub.Generate(of_model("second"), timeout=20)).read())
        mesh.pools["next"].hold_at = ""
        await mesh.start("next")
        serving.frontend.on_members(mesh.members())
        await reading
        await late
        assert not mesh.pools["stable"].submits


async def test_models_are_listed_with_what_requests_may_use(mesh: Mesh, redis_url: str) -> None:
    """The default model comes first. A model whose routers are gone does not serve."""
    async with serving_both(mesh, redis_url) as serving:
        found = await serving.stub.ListModels(pb.ListModelsRequest(), timeout=20)
        assert [(each.model, list(each.versions), each.serving) for each in found.models] == [
            ("reference", ["v1"], True),
            ("second", ["v2"], True),
        ]
        one = (await serving.stub.GetModel(pb.GetModelRequest(model="second"), timeout=20)).model
        assert one == found.models[1]
        assert (one.context_token_count, one.default_max_output_tokens) == (4096, 256)
        assert "chat" in one.capabilities and list(one.end_token_ids) == [1]
        default = await serving.stub.GetModel(pb.GetModelRequest(), timeout=20)
        assert default.model == found.models[0]
        await mesh.stop("next")
        serving.frontend.on_members(mesh.members())

        async def is_gone() -> bool:
            return not (await serving.stub.GetModel(pb.GetModelRequest(model="second"))).model.serving

        for _ in range(200):
            if await is_gone():
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the model still serves")
