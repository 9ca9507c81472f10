"""Two pools with two versions in one mesh: each router sees the replicas of its own pool alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh import server
from kvmesh.config import MeshConfig, build, describe
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.membership.membership import read_members
from kvmesh.membership.pool_mismatch import mismatches
from kvmesh.pools import version_settings
from kvmesh.redis_link import RedisLink, key
from kvmesh.tokenizer_digest import tokenizer_digest
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import generate, token_request
from tests.integration.harness import Mesh, Part, running_mesh, until
from tests.integration.live_mesh import pool_of
from tests.integration.scraped import sample

pytestmark = pytest.mark.mesh

PROMPT = list(range(100, 180))
OUTPUT = 24


def configuration(*pools: str, salt: str) -> MeshConfig:
    """Return a mesh with `pools` of one replica of each role and one or two routers.

    Version v2, of the pool `next`, has `salt`.
    """
    versions = {"stable": "v1", "next": "v2"}
    return build(
        {
            "engine": {"arithmetic": "hashed", "salt": "s1"},
            "pools": {
                pool: {"version": versions[pool], "routers": 2 if pool == "stable" else 1} for pool in pools
            },
            "versions": {"v1": {}, "v2": {"salt": salt, "step_s": 0.001}},
        }
    )


@pytest.mark.parametrize("salt", ["s1", "s2"])
async def test_pools_of_two_versions_serve_beside_each_other(salt: str, tmp_path: Path) -> None:
    """Equal salts give equal tokens under two names of versions, other salts give other tokens.

    `running_mesh` waits until each router sees exactly the replicas of its pool.
    """
    async with running_mesh(configuration("stable", "next", salt=salt), tmp_path) as mesh:
        assert sorted(mesh.running("router")) == ["next-router-0", "stable-router-0", "stable-router-1"]
        for name in mesh.running("router"):
            status = await mesh.status(name)
            assert {pool_of(view.replica) for view in status.replicas} == {pool_of(name)}
        await until(lambda: _has_routers(mesh, 3), 20, "the frontend has the routers of both pools")
        await until(lambda: _is_stable(mesh, salt), 20, "an answer of the stable pool")
        later = await of_next(mesh, tmp_path, salt)
        assert later == truth(salt, mesh.config) and (later == truth("s1", mesh.config)) == (salt == "s1")
        for name in mesh.running("router"):
            peers = 1 if pool_of(name) == "stable" else 0
            assert await sample(mesh, name, "kvmesh_router_peer_routers") == peers, name
        await check_leases(mesh)


async def _is_stable(mesh: Mesh, salt: str) -> bool:
    """Return whether the stable pool answers. Until it can place a request, the frontend leaves it for the other one."""
    found = await generate(mesh.client(), request())
    assert found.error is None and found.ids in (truth("s1", mesh.config), truth(salt, mesh.config))
    return found.ids == truth("s1", mesh.config)


async def _has_routers(mesh: Mesh, count: int) -> bool:
    """Return whether the frontend has `count` routers. Before, it may serve from the pool whose routers it has."""
    return await sample(mesh, "frontend-0", "kvmesh_frontend_routers_up") == count


async def of_next(mesh: Mesh, folder: Path, salt: str) -> list[int]:
    """Return the output of a frontend that knows the pool `next` alone."""
    part = mesh.second("frontend-0")
    config = msgspec.structs.replace(configuration("next", salt=salt), mesh=mesh.config.mesh)
    (folder / "next.toml").write_text(describe(config))
    command = list(part.command)
    command[command.index("--config") + 1] = str(folder / "next.toml")
    command[command.index("--id") + 1] = "frontend-next"
    part = Part(part.name, command, part.address, part.log)
    part.start()
    try:
        await mesh.ready(part)
        async with server.channel(part.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = await generate(stub, request())
    finally:
        await part.end()
    assert answer.error is None
    return answer.ids


async def check_leases(mesh: Mesh) -> None:
    """Each lease has pool, version and digests. A replica with another engine is refused with both values."""
    redis = RedisLink(f"redis://{mesh.parts['redis'].address}/0")
    try:
        members = {member.process_id: member for member in await read_members(redis, mesh.config.mesh.name)}
        for name in mesh.running("router", "prefill", "decode"):
            assert members[name].pool == pool_of(name)
            assert members[name].model_version == {"stable": "v1", "next": "v2"}[pool_of(name)]
        assert members["frontend-0"].pool == ""
        path = version_settings(mesh.config, "v1").model_path
        decode = members["stable-decode-0"]
        assert decode.digests["tokenizer"] == tokenizer_digest(path) and decode.digests["engine"]
        assert mismatches(list(members.values())) == {}
        other = msgspec.structs.replace(
            decode, process_id="stable-decode-9", boot_id="other", digests={"engine": "other"}
        )
        name = key(mesh.config.mesh.name, "proc", other.process_id)
        await redis.execute("SET", name, msgspec.json.encode(other))
        await redis.execute("SADD", key(mesh.config.mesh.name, "procs"), other.process_id)

        async def is_refused() -> bool:
            return await sample(mesh, "stable-router-0", "kvmesh_router_refused_replicas") == 1

        await until(is_refused, 10, "the router refuses the replica")
        log = mesh.parts["stable-router-0"].log.read_text()
        assert "replica stable-decode-9 of pool stable is refused" in log and decode.digests["engine"] in log
        streams = await redis.execute("KEYS", key(mesh.config.mesh.name, "dispatches*"))
        assert streams == [key(mesh.config.mesh.name, "dispatches", "stable").encode()]
        assert "stable-decode-9" not in mesh.parts["next-router-0"].log.read_text()
        views = (await mesh.status("stable-router-0")).replicas
        assert {view.replica for view in views} == {"stable-prefill-0", "stable-decode-0"}
    finally:
        await redis.close()


def request() -> Any:
    return token_request(PROMPT, max_output_tokens=OUTPUT)


def truth(salt: str, config: MeshConfig) -> list[int]:
    stream = Stream(0, "", 0.0, tuple(PROMPT), OUTPUT, 1, 0.0, 0, is_plain=False, frontend=0)
    return Truth(salt, config.engine.max_sequence_tokens).tokens(stream)
