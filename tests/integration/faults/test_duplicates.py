"""Two processes with the same name: one of them is used, and the other as soon as the first one ends."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh import health_reason
from kvmesh.membership.member import Member, Role
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink
from kvmesh.server import channel
from tests.integration.faults.streams import requests, run_through, undisturbed
from tests.integration.harness import Mesh, Part, until
from tests.integration.scraped import sample

pytestmark = pytest.mark.mesh

FORGED: Final[tuple[tuple[Role, str, str], ...]] = (
    ("decode", "192.0.2.1:7000", ""),
    ("prefill", "127.0.0.1:7000", "192.0.2.1:9"),
    ("router", "[::ffff:192.0.2.1]:7000", ""),
)
"""Role, address and KV address of forged members; the mesh has networks = ["127.0.0.0/8"]."""

FOUND_S_MAX = 15.0
"""Longest wait until a process is used. tests/unit/membership/test_election.py tests the time without load.
"""


@pytest.mark.parametrize(
    ("name", "end"),
    [("prefill-1", signal.SIGTERM), ("decode-1", signal.SIGKILL)],
    ids=["prefill-term", "decode-kill"],
)
async def test_a_second_replica_of_a_name_costs_no_token(mesh: Mesh, name: str, end: signal.Signals) -> None:
    """A second replica process takes the name without harm to any stream.

    The older process states why it does not serve, and is used again after the later one's end.
    """
    wanted = requests(1, 40)
    expected = await undisturbed(mesh, wanted)
    run = await run_through(mesh, wanted, expected, lambda: come_and_go(mesh, name, end))
    assert run.wrong == [] and run.answers >= len(wanted)


@pytest.mark.parametrize(
    ("name", "end"),
    [("router-0", signal.SIGTERM), ("frontend-0", signal.SIGKILL)],
    ids=["router-term", "frontend-kill"],
)
async def test_a_second_router_or_frontend_of_a_name_takes_nothing_for_good(
    mesh: Mesh, name: str, end: signal.Signals
) -> None:
    """The mesh serves with the later router or frontend, and with the older one after its end."""
    await come_and_go(mesh, name, end)
    await undisturbed(mesh, requests(2, 8))


async def test_members_outside_the_networks_are_known_to_no_process(mesh: Mesh) -> None:
    """Every process counts three forged leases outside its networks and uses none.

    They are of a replica, of a prefill replica with KV blocks elsewhere, and of a router.
    """
    redis = RedisLink(f"redis://{mesh.parts['redis'].address}")
    forged = [
        Member(
            process_id=f"{role}-9",
            role=role,
            address=address,
            boot_id="forged",
            model_version=mesh.config.engine.salt,
            block_tokens=mesh.config.engine.block_tokens,
            kv_address=kv_address,
        )
        for role, address, kv_address in FORGED
    ]
    try:
        for member in forged:
            lease = msgspec.json.encode(member)
            await redis.execute("SET", f"kvmesh:proc:{member.process_id}", lease, "PX", 30_000)
            await redis.execute("SADD", "kvmesh:procs", member.process_id)
        for name in mesh.running("frontend", "router", "prefill", "decode"):
            await until(partial(refused, mesh, name), 20, f"{name} refuses the forged members")
        assert not [view for view in (await mesh.status("router-0")).replicas if view.replica.endswith("-9")]
    finally:
        await redis.execute("DEL", *(f"kvmesh:proc:{member.process_id}" for member in forged))
        await redis.execute("SREM", "kvmesh:procs", *(member.process_id for member in forged))
        await redis.close()


async def refused(mesh: Mesh, name: str) -> bool:
    """Return True if process `name` has refused three members."""
    return await sample(mesh, name, f"kvmesh_{name.partition('-')[0]}_refused_members_total") == 3


async def come_and_go(mesh: Mesh, name: str, end: signal.Signals) -> None:
    """Start a second process of `name` and end it again; wait for the expected state of each of the two."""
    original, redis = mesh.parts[name], RedisLink(f"redis://{mesh.parts['redis'].address}")
    try:
        assert await health(original.address) == (True, "")
        async with second(mesh, name) as other:
            await until(
                lambda: is_used(mesh, redis, name, other.address), FOUND_S_MAX, "the later one is used"
            )
            await until(
                lambda: is_superseded(original.address), FOUND_S_MAX, "the older one states the reason"
            )
            assert await health(other.address) == (True, "")
            _, reason = await health(original.address)
            assert f"named {name} " in reason and other.address in reason
            await other.end(end)
            await until(
                lambda: is_used(mesh, redis, name, original.address), FOUND_S_MAX, "the older one is used"
            )
        assert await health(original.address) == (True, "")
    finally:
        await redis.close()


@asynccontextmanager
async def second(mesh: Mesh, name: str) -> AsyncIterator[Part]:
    """Start another process of that name at another address, with the same engine."""
    other = mesh.second(name)
    other.start()
    try:
        await mesh.ready(other)
        yield other
    finally:
        if other.is_running:
            await other.end()


async def is_used(mesh: Mesh, redis: RedisLink, name: str, address: str) -> bool:
    """Return True if the process at `address` is listed under its name; for a replica, also if it is
    placeable.
    """
    listed = {member.process_id: member.address for member in await read_members(redis, "kvmesh")}
    if listed.get(name) != address:
        return False
    if name.startswith(("router", "frontend")):
        return True
    views = (await mesh.status("router-0")).replicas
    return any((view.replica, view.address) == (name, address) and view.placeable for view in views)


async def is_superseded(address: str) -> bool:
    """Return True if the process at `address` reports that it is superseded."""
    is_serving, reason = await health(address)
    return not is_serving and reason.startswith("superseded")


async def health(address: str) -> tuple[bool, str]:
    """Return True if the process at `address` serves, and its reason."""
    async with channel(address) as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        answer = await call
        reason = health_reason.reason_of(await call.trailing_metadata())
    return answer.status == health_pb2.HealthCheckResponse.SERVING, reason
