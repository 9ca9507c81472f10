"""The watch of a held replica, against scripted views of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.config import MeshConfig
from kvmesh.router.v1 import router_pb2
from kvmesh.tasks import end
from tests.chaos import held_watch
from tests.chaos.held_watch import HeldWatch
from tests.chaos.records import ColdReturn
from tests.integration.live_mesh import until

View = tuple[bool, bool, int]
"""Held, placeable, and the requests that are dispatched and have not ended."""

WARM_UP: Sequence[View] = (
    (False, True, 3),
    (True, False, 2),
    (True, False, 0),
    (False, True, 0),
    (False, True, 4),
)


class ScriptedMesh:
    """One router, which sees the replica as the script says: one view for each status, and the last one from then on."""

    def __init__(self, script: Sequence[View]) -> None:
        self.config = MeshConfig()
        self.parts = {"prefill-0": SimpleNamespace(is_running=False)}
        self.left = list(script)

    def running(self, *roles: str) -> list[str]:
        return ["router-0", "next-router-0"] if "router" in roles else []

    async def status(self, name: str) -> router_pb2.GetStatusResponse:
        assert name == "router-0", "the router of the other pool does not see the replica"
        held, placeable, dispatched = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        view = router_pb2.ReplicaView(
            replica="prefill-0", placeable=placeable, dispatched_request_count=dispatched
        )
        view.load_report.held = held
        return router_pb2.GetStatusResponse(replicas=[view])


async def watched(script: Sequence[View], monkeypatch: pytest.MonkeyPatch) -> ColdReturn:
    """Return the record of a watch that saw all of `script`."""
    monkeypatch.setattr(held_watch, "LOOK_EVERY_S", 0.0)
    mesh = ScriptedMesh(script)
    rig: Any = SimpleNamespace(mesh=mesh)
    watch = HeldWatch(rig, "prefill-0", lambda: 9.0)
    looking = asyncio.create_task(watch.run())
    await until(lambda: len(mesh.left) == 1, 5, "the script has ended")
    await watch.until_in_service()
    await end([looking])
    return watch.told(mended_s=5.0, returned_s=7.0)


async def test_a_replica_that_is_left_alone_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests from before the hold may end, and requests after it are welcome."""
    told = await watched(WARM_UP, monkeypatch)
    assert (told.placed, told.held_looks, told.boot_s, told.in_service_s) == ([], 2, 2.0, 2.0)
    assert told.bound_s == 141.0


@pytest.mark.parametrize(
    ("at", "view", "what"),
    [
        (2, (True, True, 0), "router-0 may place on prefill-0"),
        (2, (True, False, 3), "router-0 placed 1 requests on prefill-0"),
    ],
)
async def test_a_request_at_a_held_replica_is_noted(
    monkeypatch: pytest.MonkeyPatch, at: int, view: View, what: str
) -> None:
    script = list(WARM_UP)
    script[at] = view
    assert (await watched(script, monkeypatch)).placed == [what]
