"""The first requests of a frontend that has just started wait for the routers of every pool with a weight."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final, cast

from kvmesh.clock import VirtualClock
from kvmesh.config import build
from kvmesh.inference.v1 import inference_pb2
from kvmesh.snapshot.content import Content, PoolTrack, Track
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request_spec import NOBODY, RequestSpec
from services.frontend.requests.resume_token import SECRET_BYTES, Seal
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.start_gate import StartGate
from services.frontend.surface import served_versions
from services.frontend.surface.intake import Arrival, Intake
from services.frontend.surface.request_parser import RequestParser
from tests.unit.frontend.fake_mesh import FakeMesh

WAIT_S: Final = 30.0
SESSIONS: Final = 40
POOLS: Final = (("stable", "v1"), ("next", "v2"), ("idle", "v2"))
CONTENT: Final = Content(
    (
        PoolTrack("stable", "v1", Track.STABLE, 80),
        PoolTrack("next", "v2", Track.CANARY, 20),
        PoolTrack("idle", "v2"),
    ),
    rollout="r1",
)


class Fresh:
    """The intake of a frontend that has just started, and routers that it has not found yet."""

    def __init__(self) -> None:
        self.core = FrontendCore(
            Limits(4, 3.0, 16), limit=64, retries=RetryBudget(0.0, 3.0, 1000.0), jitter=lambda: 0.5
        )
        self.core.take_snapshot(CONTENT)
        self.mesh = FakeMesh(self.core, random.Random(0), 1, POOLS)
        versions = {"v1": {"salt": "a"}, "v2": {"salt": "b"}}
        loaded = served_versions.load(
            build({"versions": versions, "pools": {name: {"version": each} for name, each in POOLS}})
        )
        self.start_gate = StartGate(lambda: self.core.pools.has_each_pool)
        seal, no_executions = Seal(b"1" * SECRET_BYTES), cast(Any, None)  # only keys and tokens need them
        self.intake = Intake(
            self.core,
            loaded,
            RequestParser(loaded, seal, message_bytes_max=1 << 20),
            no_executions,
            seal,
            VirtualClock(),
            opened=self.start_gate.opened,
        )

    def attach(self, pool: str) -> None:
        """Bring the router of `pool` up."""
        self.mesh.open(next(each for each in self.mesh.routers if each.pool == pool))

    async def read(self, session: str) -> RequestSpec:
        """Return the spec of a request of `session`."""
        request = inference_pb2.GenerateRequest(session_id=session)
        request.text = "hello"
        arrival = Arrival(NOBODY, 1000.0, None, session, True, "")
        return await self.intake.read(request.SerializeToString(), arrival)


async def test_no_request_is_diverted_because_one_router_was_found_before_the_other() -> None:
    """The canary's router comes first. No request chooses before stable's router is there, and all go by weight."""
    fresh = Fresh()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(fresh.read(f"s{each}")) for each in range(SESSIONS)]
        tasks.create_task(fresh.start_gate.run(WAIT_S))
        fresh.attach("next")
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(read.done() for read in reads)
        fresh.attach("stable")
    pools = fresh.core.pools
    assert [read.result().pool for read in reads] == [
        pools.assigned("", f"s{each}").pool for each in range(SESSIONS)
    ]
    assert {read.result().pool for read in reads} == {"stable", "next"} and not pools.diverted


async def test_a_pool_that_stays_away_ends_no_frontend() -> None:
    """After the longest wait the requests of a dead pool are diverted. The gate stays open: later ones do not wait."""
    fresh = Fresh()
    fresh.attach("stable")
    async with asyncio.timeout(WAIT_S):
        await fresh.start_gate.run(0.0)
        found = {(await fresh.read(f"s{each}")).pool for each in range(SESSIONS)}
    assert found == {"stable"} and fresh.core.pools.diverted["next"]


async def test_an_end_before_the_gate_opens_lets_the_requests_go() -> None:
    """A frontend that is told to stop cancels the gate, and its waiting requests get an answer."""
    fresh = Fresh()
    fresh.attach("stable")
    async with asyncio.timeout(WAIT_S):
        waiting, gate = (
            asyncio.create_task(fresh.read("s")),
            asyncio.create_task(fresh.start_gate.run(WAIT_S)),
        )
        await asyncio.sleep(0)
        gate.cancel()
        assert (await waiting).session_id == "s"
