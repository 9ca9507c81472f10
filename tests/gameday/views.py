"""The regions as each control plane lists them, once a second during a game day."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import msgspec

from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import region_pb2_grpc

EVERY_S: Final = 1.0
HEALTHY: Final = "HEALTHY"
SUSPECT: Final = "SUSPECT"
OUT: Final = "OUT"


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One region as the control plane of region `by` lists it."""

    at_s: float
    """After the begin of the event."""
    by: str
    region: str
    observed: str = ""
    """Empty for the own region."""
    declared: str = ""
    weight: float = 0.0
    spill: float = 0.0
    """Share of the callers of `by` that is spilled to the region."""
    health: float | None = None
    is_stale: bool = False
    load: float = 0.0
    """Uncached tokens per second, as all quantities here."""
    capacity: float = 0.0
    headroom: float = 0.0
    grants: Mapping[str, float] = {}
    """Grants of the region, by source region."""
    reason: str = ""


def view_of(at_s: float, by: str, found: Any) -> View:
    """Return a row of ListRegions."""
    signals = found.signals
    return View(
        at_s=round(at_s, 2),
        by=by,
        region=found.region,
        observed=""
        if found.is_own
        else pb.ObservedState.Name(found.observed).removeprefix("OBSERVED_STATE_"),
        declared=pb.DeclaredState.Name(found.declared.state).removeprefix("DECLARED_STATE_"),
        weight=round(found.weight, 3),
        spill=round(found.spill_share, 3),
        health=round(found.health, 3) if found.HasField("health") else None,
        is_stale=found.is_stale,
        load=round(signals.load.tokens_per_s, 1),
        capacity=round(signals.capacity.tokens_per_s, 1),
        headroom=round(found.headroom.tokens_per_s, 1),
        grants={each.region: round(each.quantity.tokens_per_s, 1) for each in found.grants},
        reason=found.reason,
    )


class Watcher:
    """Asks the control planes. `controls`: region -> addresses, of which one leads."""

    def __init__(self, controls: Mapping[str, Sequence[str]]) -> None:
        self._controls = controls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.seen: list[tuple[float, str, Any]] = []
        """Time on the monotonic clock, region of the control plane, row."""

    async def look(self) -> None:
        """Ask every control plane once. One that does not answer within EVERY_S has no rows."""
        async with asyncio.TaskGroup() as group:
            for region, addresses in self._controls.items():
                for address in addresses:
                    group.create_task(self._ask(region, address))

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            due_s = time.monotonic() + EVERY_S
            await self.look()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def views(self, struck_s: float) -> list[View]:
        """Return all rows."""
        return [view_of(at_s - struck_s, by, row) for at_s, by, row in self.seen]

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close(None)

    async def _ask(self, region: str, address: str) -> None:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(
                address, options=[("grpc.max_reconnect_backoff_ms", 1000)]
            )
        stub: Any = region_pb2_grpc.RegionServiceStub(self._channels[address])
        with suppress(grpc.RpcError):  # it is dead, or another process leads
            answer = await stub.ListRegions(pb.ListRegionsRequest(), timeout=EVERY_S)
            now_s = time.monotonic()
            self.seen += [(now_s, region, row) for row in answer.regions]
