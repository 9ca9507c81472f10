"""Commands of operators at a process that takes the lead over."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.command_queue import Author, Command
from controlplane.command_runs import CommandRuns, Context
from controlplane.leadership import LeaderState
from controlplane.loop import ControlLoop
from controlplane.operators import Prepared
from controlplane.region_control import RegionControl, RegionNames
from controlplane.region_operators import RegionOperators
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import RegionOrders
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


def taking_over() -> tuple[Driver, Callable[..., Any]]:
    """Return a leader of a drained region, before its first answer of Redis, and its way to run a command.

    The loop of a control process is replaced: it queues the command, and lets the takeover end before it returns.
    """
    driver = Driver()
    regions = driver.core.regions = RegionControl(
        RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: driver.now_s
    )
    driver.desired = encode(Desired(revision=1).with_regions(RegionOrders().with_declared("eu", DRAINED)))
    driver.reads = False
    driver.tick()
    assert driver.core.leads and driver.core.leadership.state is LeaderState.TAKING_OVER
    operators = RegionOperators(driver.core, regions, lambda: driver.now_s)

    async def command(make: Callable[[int], Command]) -> None:
        driver.core.command(make(1), driver.now_s)
        driver.reads = True
        driver.lead()

    loop = SimpleNamespace(core=driver.core, command=command)
    runs = CommandRuns(cast(ControlLoop, loop), SimpleNamespace(now_s=lambda: driver.now_s))

    async def run(prepare: Callable[[RegionOperators], Prepared], *, is_trial: bool = False) -> None:
        await runs.run(prepare(operators), cast(Context, Caller()), is_trial=is_trial)

    return driver, run


async def test_a_command_about_regions_waits_for_what_is_written_down() -> None:
    """The check before the queue would refuse it: the region serves as far as this process knows yet."""
    for prepare, is_serving in (
        (lambda operators: operators.restore(pb.RestoreRegionRequest(region="eu"), Author()), True),
        (
            lambda operators: operators.drain(pb.DrainRegionRequest(region="eu", reason="longer"), Author()),
            False,
        ),
    ):
        driver, run = taking_over()
        await run(prepare)
        assert driver.done == {1: ""}
        assert driver.core.library.desired.regions.declared["eu"].is_serving is is_serving


async def test_a_trial_during_a_takeover_is_told_to_come_back() -> None:
    """A trial has no place in the queue."""
    driver, run = taking_over()
    with pytest.raises(MeshError, match="takes the lead over") as caught:
        await run(
            lambda operators: operators.restore(pb.RestoreRegionRequest(region="eu"), Author()), is_trial=True
        )
    assert caught.value.reason == "STORE_UNAVAILABLE" and caught.value.retry_after_s
    assert not driver.done
