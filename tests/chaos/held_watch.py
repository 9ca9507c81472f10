"""Watches one replica from outside while a fault hits it: whether it is held, and whether users' requests meet it then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc

from kvmesh.control.v1 import snapshot_pb2, warm_up_pb2, warm_up_pb2_grpc
from kvmesh.roles import CONTROL
from tests.chaos import census
from tests.chaos.records import ColdReturn
from tests.chaos.rig import Rig
from tests.integration.live_mesh import pool_of, role_of, until

LOOK_EVERY_S: Final = 0.05
SPARE_S: Final = 15.0
"""A replica that is late is waited for this much longer, so that the record has its time."""

ANSWER_S: Final = 5.0
PREFIX: Final = "REPLICA_STATE_"


class HeldWatch:
    """`now_s` is the runner's clock. `run` looks until it is cancelled."""

    def __init__(self, rig: Rig, replica: str, now_s: Callable[[], float]) -> None:
        self._rig = rig
        self._replica = replica
        self._now_s = now_s
        self._in_service_s: float | None = None
        self._held_looks = 0
        self._placed: list[str] = []
        self._is_held = False
        self._dispatched: dict[str, int] = {}
        """Requests at the replica that a router dispatched before it knew that the replica is held, by router."""
        self._calls: float | None = None
        """Ended engine calls of users, counted while the replica was held."""
        self._life = warm_up_pb2.Life()

    @property
    def bound_s(self) -> float:
        """Longest time from the return of a replica until it is in service: the bounds of the states of a warm-up."""
        bounds = self._rig.mesh.config.warm_up
        return bounds.warming_max_s + bounds.seeding_max_s + bounds.probing_max_s

    async def run(self) -> None:
        """Look at the routers and at the replica until cancelled."""
        while True:
            with suppress(grpc.aio.AioRpcError, census.Unreachable):  # a part that the fault hit
                await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def until_in_service(self) -> float | None:
        """Wait until all routers may place on the replica. Return the time; None: not even SPARE_S behind the bound."""
        with suppress(AssertionError):
            await until(self._is_in_service, self.bound_s + SPARE_S, "in service", every_s=LOOK_EVERY_S)
            self._in_service_s = self._now_s()
            self._life = await self._told()
        return self._in_service_s

    def told(self, mended_s: float, returned_s: float) -> ColdReturn:
        """Return the record. `mended_s` and `returned_s`: see Moments."""
        life, name = self._life, snapshot_pb2.ReplicaState.Name
        in_service_s = self._in_service_s
        return ColdReturn(
            boot_s=round(returned_s - mended_s, 3),
            in_service_s=None if in_service_s is None else round(in_service_s - returned_s, 3),
            bound_s=self.bound_s,
            held_looks=self._held_looks,
            proved=life.proved,
            self_served=life.self_served,
            states_s={
                name(each.state).removeprefix(PREFIX).lower(): round(each.time.ToNanoseconds() / 1e9, 3)
                for each in life.times
            },
            reason=life.reason,
            placed=self._placed,
        )

    async def _look(self) -> None:
        calls = await self._ended_calls()
        views = await self._views()
        held = {router: view for router, view in views.items() if view.load_report.held}
        if held and self._is_held:
            # The replica was held before the calls were counted, and is held still.
            self._calls = calls if self._calls is None else self._calls
            if calls is not None and self._calls is not None and calls > self._calls:
                self._note(f"{calls - self._calls:.0f} engine calls of users ended at {self._replica}")
                self._calls = calls
        elif not held:
            self._calls = None
            self._dispatched.clear()
        self._is_held = bool(held)
        self._held_looks += bool(held)
        for router, view in held.items():
            count = view.dispatched_request_count
            before = self._dispatched.setdefault(router, count)
            if view.placeable:
                self._note(f"{router} may place on {self._replica}")
            if count > before:
                self._note(f"{router} placed {count - before} requests on {self._replica}")
            self._dispatched[router] = min(before, count)

    def _note(self, what: str) -> None:
        if what not in self._placed:
            self._placed.append(what)

    async def _is_in_service(self) -> bool:
        with suppress(grpc.aio.AioRpcError):
            views = (await self._views()).values()
            return all(view.placeable and not view.load_report.held for view in views) and bool(views)
        return False

    async def _views(self) -> dict[str, Any]:
        """Return how each router of the pool sees the replica."""
        mesh, found = self._rig.mesh, {}
        for router in mesh.running("router"):
            if pool_of(router) == pool_of(self._replica):
                status = await mesh.status(router)
                for view in status.replicas:
                    if view.replica == self._replica:
                        found[router] = view
        return found

    async def _ended_calls(self) -> float | None:
        if not self._rig.mesh.parts[self._replica].is_running:
            return None
        try:
            samples = await census.scrape(self._rig, self._replica)
        except AssertionError:
            return None  # it has not written its ready line yet
        return samples.get(f"kvmesh_{role_of(self._replica)}_engine_calls_total", 0.0)

    async def _told(self) -> warm_up_pb2.Life:
        """Return the life as the leader tells it; an empty one without a leader."""
        for name in self._rig.mesh.running(CONTROL):
            stub: Any = warm_up_pb2_grpc.WarmUpServiceStub(self._rig.mesh.channel(name))
            with suppress(grpc.aio.AioRpcError):  # a follower
                found = await stub.ListLives(warm_up_pb2.ListLivesRequest(), timeout=ANSWER_S)
                return next((each for each in found.lives if each.process_id == self._replica), self._life)
        return self._life
