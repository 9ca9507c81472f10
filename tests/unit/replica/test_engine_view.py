"""A stale load report of an engine counts as unknown."""

from __future__ import annotations

from kvmesh.replica.engine_view import FRESH_S, EngineView
from kvmesh.triton.port import EngineLoad

FULL = EngineLoad("boot-1", 64, 0, sequences_running=3, step_s=0.5)


def test_a_stale_report_counts_as_unknown() -> None:
    """Its boot id stays known, its load does not."""
    view = EngineView()
    assert view.fresh(0.0) is None and view.step_s(0.0) == 0
    assert view.take(FULL, 100.0) and not view.take(FULL, 101.0)
    assert view.fresh(101.0 + FRESH_S) == FULL and view.step_s(101.0) == 0.5
    assert view.fresh(101.1 + FRESH_S) is None and view.step_s(101.1 + FRESH_S) == 0
    assert view.boot_id == "boot-1" and view.last == FULL


def test_an_idle_engine_measures_no_step() -> None:
    """The step duration of an ended batch does not hold for the next one."""
    view = EngineView()
    view.take(EngineLoad("boot-1", 64, 64, sequences_running=0, step_s=0.5), 100.0)
    assert view.step_s(100.0) == 0
