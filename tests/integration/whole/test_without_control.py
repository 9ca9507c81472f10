"""The mesh without its control plane, and rolling drains, in short: `make without-control` has the long form."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.rolling_drains import rolling_drains
from tests.chaos.stage import Stage, stage
from tests.chaos.without_control import without_canary, without_control

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.asyncio(loop_scope="module"),
]

CLIENTS = 4
"""Fewer than in the long form: the CPU of the load is most of that of this test."""

DRAINS = 3
"""A decode replica and a prefill replica by the control plane, a router by SIGTERM."""

DEAD_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One mesh for all tests. Each of them starts what it needs and does not run."""
    async with stage(tmp_path_factory.mktemp("without-control"), CLIENTS) as made:
        yield made


async def test_rolling_drains_lose_nothing(shared: Stage) -> None:
    """Processes drain and return under load, by both means; every answer has the right tokens."""
    drains = await rolling_drains(shared, DRAINS)
    print(drains)
    assert not drains.faults
    assert (drains.by_control, drains.by_signal) == (2, 1)


async def test_a_dead_control_plane_changes_nothing(shared: Stage) -> None:
    """Redis loses its data and processes restart: same snapshot, same pool of each session, no answer lost."""
    dead = await without_control(shared, DEAD_S)
    print(dead)
    assert not dead.faults
    assert dead.share_before > 0 and dead.share_after > 0, (
        "the canary had no traffic: its weight proves nothing"
    )


async def test_a_dead_canary_is_left_at_once(shared: Stage) -> None:
    """New requests go to stable within 2 s and none is refused; "all to stable" holds without a control plane."""
    canary = await without_canary(shared)
    print(canary)
    assert not canary.faults
    assert not canary.refused and not canary.direct_canary
