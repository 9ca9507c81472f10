"""A process that starts tells health checks its unmet conditions, and exports them."""

from __future__ import annotations

from kvmesh.clock import MonotonicClock
from kvmesh.metrics import Metrics
from kvmesh.start import export_start, wait_for_start
from kvmesh.start_conditions import StartConditions


class SteppedClock(MonotonicClock):
    """A clock that moves by 0.1 s with each look."""

    def __init__(self) -> None:
        self.at_s = 50.0

    def now_s(self) -> float:
        self.at_s += 0.1
        return self.at_s


async def test_each_change_of_the_unmet_conditions_is_told_once() -> None:
    """The reason names them; the metrics show the seconds, and no condition as missed."""
    clock, told = SteppedClock(), list[str]()
    start, metrics = StartConditions(("leases", "replica links"), 50.0), Metrics("router")
    export_start(start, metrics)

    async def tell(reason: str) -> None:
        told.append(reason)

    await wait_for_start(
        start, lambda now_s: {"leases": now_s > 50.35, "replica links": now_s > 50.75}, clock, tell
    )
    assert told == ["starting: waits for leases, replica links", "starting: waits for replica links"]
    text = metrics.text().decode()
    assert 'start_condition_seconds{condition="replica_links"} 0.8' in text
    assert 'start_condition_missed{condition="leases"} 0.0' in text


async def test_the_end_of_the_wait_names_the_missed_condition() -> None:
    """A condition that never holds ends the wait after START_WAIT_S, and its gauge is 1."""
    start, metrics = StartConditions(("leases", "replica links"), 50.0), Metrics("router")
    export_start(start, metrics)

    async def tell(_: str) -> None:
        return None

    await wait_for_start(start, lambda _: {"leases": True, "replica links": False}, SteppedClock(), tell)
    assert start.unmet == ["replica links"]
    assert 'start_condition_missed{condition="replica_links"} 1.0' in metrics.text().decode()
