"""The fake engine keeps the contract of the real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.unit.triton.contract import CHECKS, Recorder, Rig
from tests.unit.triton.fake_engine import FakeEngine


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_fake_keeps_the_contract(check: Callable[[Rig], Awaitable[None]]) -> None:
    """Each part of the contract holds for the fake of the unit tests."""
    sink = Recorder()
    engine = FakeEngine(sink)
    await check(Rig(engine, sink, lambda: engine.step(0.0)))
    assert not engine.live and not engine.held
