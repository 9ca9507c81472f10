"""RegionService at a process that takes the lead over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane import region_federation
from controlplane.command_queue import Command
from controlplane.loop import ControlLoop
from controlplane.region_control import RegionControl, RegionNames
from controlplane.region_federation import RegionFederation
from controlplane.region_operators import RegionOperators
from controlplane.region_service import RegionServicer
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import RegionOrders
from controlplane.regions.settings import RegionSettings
from controlplane.snapshots.desired import Desired, encode
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.errors import MeshError
from tests.unit.controlplane.test_core import Driver

DRAINED = Declared(state=DeclaredState.DRAINED, revision=2, reason="upgrade", author="ann")


class Caller:
    """The context of a local call without a certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return no certificate."""
        return {}

    def peer(self) -> str:
        """Return an address of this host."""
        return "ipv4:127.0.0.1:1"


def taking_over(**settings: float) -> tuple[Driver, RegionServicer]:
    """Return a leader of a drained region before its first answer of Redis, and its service."""
    driver = Driver()
    names, parameters = RegionNames("eu", {"eu": 0.5, "us": 0.5}), RegionSettings(**settings)  # type: ignore[arg-type]
    regions = driver.core.regions = RegionControl(names, lambda: driver.now_s, parameters)
    driver.desired = encode(Desired(revision=1).with_regions(RegionOrders().with_declared("eu", DRAINED)))
    driver.reads = False
    driver.tick()
    assert driver.core.leads and not regions.is_begun

    async def command(make: Callable[[int], Command]) -> None:
        driver.core.command(make(1), driver.now_s)
        driver.perform()

    loop: Any = SimpleNamespace(
        core=driver.core, command=command, hint=lambda: SimpleNamespace(leader_address="")
    )
    clock: Any = SimpleNamespace(now_s=lambda: driver.now_s)
    operators = RegionOperators(driver.core, regions, lambda: driver.now_s)
    reader: Any = None
    return driver, RegionServicer(
        cast(ControlLoop, loop), regions, operators, reader, clock, lambda: driver.now_s
    )


CALLS: dict[str, Callable[[RegionServicer, Any], Any]] = {
    "list": lambda service, caller: service.ListRegions(pb.ListRegionsRequest(), caller),
    "drain": lambda service, caller: service.DrainRegion(
        pb.DrainRegionRequest(region="eu", reason="longer"), caller
    ),
    "restore": lambda service, caller: service.RestoreRegion(pb.RestoreRegionRequest(region="eu"), caller),
    "trial": lambda service, caller: service.RestoreRegion(
        pb.RestoreRegionRequest(region="eu", validate_only=True), caller
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_operators_wait_for_what_is_written_down(name: str) -> None:
    """Before that the region would be shown as serving, and its restore refused."""
    driver, service = taking_over()
    call = asyncio.create_task(CALLS[name](service, Caller()))
    done, _ = await asyncio.wait([call], timeout=0.1)
    assert not done
    driver.reads = True
    driver.lead()
    answer = await call
    own = next(each for each in answer.regions if each.is_own) if name == "list" else answer.region
    assert (own.declared.state == pb.DECLARED_STATE_SERVING) is (name == "restore")
    assert driver.done == ({} if name in ("list", "trial") else {1: ""})


async def test_a_process_that_loses_the_lead_meanwhile_says_so() -> None:
    """The caller looks for the leader."""
    driver, service = taking_over()
    call = asyncio.create_task(service.ListRegions(pb.ListRegionsRequest(), cast(Any, Caller())))
    await asyncio.sleep(0)
    driver.core.release()
    with pytest.raises(MeshError, match="does not lead"):
        await call


async def after_takeover(driver: Driver, running: asyncio.Task[None], effects: Sized) -> None:
    """Assert that `running` has no effect during the takeover of `driver`, and then let the takeover end."""
    before = len(effects)
    await asyncio.wait([running], timeout=0.15)
    assert len(effects) == before
    driver.reads = True
    driver.lead()
    await asyncio.wait([running], timeout=0.15)
    assert len(effects) > before


async def test_a_takeover_tells_other_regions_nothing() -> None:
    """Its news would lack processes, version and rollout. The first ones follow at once behind its end.

    A leader that loses the lead, and has it again before the next news are due, takes over anew.
    """
    driver, service = taking_over(signals_every_s=0.05)
    written: list[pb.FederateResponse] = []

    class Stream:
        async def write(self, message: pb.FederateResponse) -> None:
            written.append(message)

    writing = asyncio.create_task(service._write(cast(Any, Stream())))
    await after_takeover(driver, writing, written)
    assert {message.news.region for message in written} == {"eu"} and written[0].news.HasField("signals")
    driver.core.release()
    driver.reads = False
    while not driver.core.leads:
        driver.tick()
    await after_takeover(driver, writing, written)
    driver.core.release()
    await writing


async def test_a_takeover_dials_no_other_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way of the news."""
    driver, _ = taking_over()
    assert driver.core.regions is not None
    unused: Any = None
    loop: Any = SimpleNamespace(core=driver.core)
    federation = RegionFederation(loop, driver.core.regions, {}, unused, unused, "kvmesh", unused)
    dialled: list[str] = []

    async def dial(address: str) -> str:
        dialled.append(address)
        return ""

    monkeypatch.setattr(federation, "_try", dial)
    monkeypatch.setattr(region_federation, "RETRY_S", 0.01)
    keeping = asyncio.create_task(federation._keep("us", ["127.0.0.1:1"]))
    await after_takeover(driver, keeping, dialled)
    keeping.cancel()
