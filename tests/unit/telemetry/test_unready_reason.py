"""Why a process is out of service for users, although its health may be SERVING. Replicas and routers without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvmesh.advertise import AS_LISTENED
from kvmesh.clock import VirtualClock
from kvmesh.config import MeshConfig
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics
from kvmesh.metrics_port import exposed
from kvmesh.process import UNREGISTERED, MeshProcess
from kvmesh.replica.engine_facts import EngineFacts
from kvmesh.replica.options import ReplicaOptions
from kvmesh.replica.process import ENGINE_LOST, _Replica
from kvmesh.server import DRAINS, STARTS, MeshServer
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.content import Content, Cordon
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.published import Term, publish
from kvmesh.triton.client import TritonClient
from kvmesh.trust.peers import Trust
from services.decode.main import _build as build_decode
from services.frontend.readiness import NO_ROUTER, follow_routers
from services.prefill.main import _build as build_prefill
from services.router.main import Router
from tests.patience import patience, wait_for
from tests.unit.triton.fake_engine import facts

NOWHERE = "127.0.0.1:1"
REDIS = f"redis://{NOWHERE}"
BUILDS = {"prefill": build_prefill, "decode": build_decode}
HELD = "held by the control plane until it is warm"


@asynccontextmanager
async def replica(role: Any) -> AsyncIterator[_Replica]:
    """A replica whose engine does not answer."""
    config = MeshConfig()
    options = ReplicaOptions(config, f"{role}-0", "127.0.0.1:0", REDIS, 0, AS_LISTENED, role, NOWHERE)
    client = TritonClient(NOWHERE)

    async def read() -> Any:
        raise AssertionError("the engine has no second boot")

    made = _Replica(options, Trust(config, role), BUILDS[role], EngineFacts(facts(), read), client)
    try:
        yield made
    finally:
        await made.close()
        await client.close()


def order(state: pb.ReplicaState.ValueType, reason: str = "") -> pb.LifeOrder:
    return pb.LifeOrder(state=state, engine_boot_id="boot-1", reason=reason)


def register(process: MeshProcess) -> None:
    """Let the process have written its lease."""
    process.registration = Registration(process.redis, "m", process.member("127.0.0.1:1"))
    process.registration.has_held = True


def offer(process: MeshProcess, version: int, *cordons: Cordon) -> None:
    """Let the process take a snapshot."""
    stable = initial_content(process.options.config).pools
    process.control.receiver._offer(publish(Term(1, "c"), version, Content(stable, cordons=cordons)))


@pytest.mark.parametrize("role", BUILDS)
async def test_a_replica_says_why_it_is_out_of_service(role: str) -> None:
    """A reason of health goes first: start, engine, drain. Then a cordon, the state of the life, and the registration."""
    async with replica(role) as made:
        why = made.unready_reason
        assert why() == STARTS
        await made._report(False, "")
        assert why() == ENGINE_LOST
        made._life.start(is_control_known=True)
        made._life.on_engine("boot-1", is_control_known=True)
        await made._report(True, "boot-1")
        assert made.server.unready_reason == "" and why() == f"starting: {HELD}"
        for state in ("WARMING", "SEEDING", "PROBING"):
            made.on_life(True, order(pb.ReplicaState.Value(f"REPLICA_STATE_{state}"), "pass 1 over 3 shapes"))
            assert made.server.unready_reason == "" and why() == f"{state.lower()}: {HELD}"
        made.on_life(True, order(pb.REPLICA_STATE_SERVING))
        assert made.server.unready_reason == "" and why() == UNREGISTERED
        made.on_members([])
        await made.become_ready()
        assert why() == UNREGISTERED, "no lease is in Redis"
        register(made)
        assert why() == ""
        offer(made, 1, Cordon(f"{role}-0", reason="new disk"))
        assert made.server.unready_reason == "" and why() == "cordoned by the control plane: new disk"
        made.on_life(True, order(pb.REPLICA_STATE_QUARANTINED, "wrong golden tokens"))
        assert why() == "cordoned by the control plane: new disk"
        offer(made, 2, Cordon(f"{role}-0", is_draining=True))
        assert why() == "draining by the control plane"
        offer(made, 3)
        assert made.server.unready_reason == "" and why() == "quarantined: wrong golden tokens"
        made.server.stop()
        assert why() == DRAINS


async def test_a_frontend_without_a_router_says_so() -> None:
    """The page has the reason that gRPC health has, and the frontend is ready again with its first router."""
    server, clock = MeshServer("frontend", "frontend-0", ["any"]), VirtualClock()
    is_found = False

    def has_router() -> bool:
        clock.advance(1.0)
        return is_found

    async with exposed(Metrics("frontend"), lambda: server.unready_reason, "127.0.0.1", 0) as address:
        assert await ready(address) == (503, f"{STARTS}\n")
        await server.set_serving(True)
        assert await ready(address) == (200, "ready\n")
        following = asyncio.create_task(follow_routers(has_router, clock, server.set_serving, 0.001))
        for is_found, answer in ((False, (503, f"{NO_ROUTER}\n")), (True, (200, "ready\n"))):
            async with patience(5):
                while (server.unready_reason == "") is not is_found:
                    await asyncio.sleep(0.001)
            assert await ready(address) == answer
        await server.stand_by("another process holds the name")
        assert await ready(address) == (503, "another process holds the name\n")
        server.stop()
        assert await ready(address) == (503, f"{DRAINS}\n")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def ready(address: str) -> tuple[int, str]:
    """Return status and body of /readyz."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
    head, _, body = (await wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()


async def test_a_router_that_is_cordoned_is_not_ready() -> None:
    """Peers leave it alone by its lease, so its health is SERVING."""
    router = Router(ServiceOptions(MeshConfig(), "router-0", "127.0.0.1:0", REDIS, 0, AS_LISTENED))
    assert router.unready_reason() == STARTS
    await router.server.set_serving(True)
    assert router.unready_reason() == UNREGISTERED
    register(router)
    assert router.unready_reason() == ""
    offer(router, 1, Cordon("router-0"), Cordon("router-1"))
    assert router.server.unready_reason == ""
    assert router.unready_reason() == "cordoned by the control plane"
    offer(router, 2, Cordon("router-1"))
    assert router.unready_reason() == ""
    await router.close()
