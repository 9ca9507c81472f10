"""Scenarios against the real parts, in windows too short to mean anything: they must still agree with them."""

from __future__ import annotations

import pytest

from bench import aims, windows
from bench.results import Key, Results, ScenarioResults
from bench.scenarios import index, router

BRIEF = windows.Pace(1, 0.2, 0.5, 0.5, is_quick=True, is_full=False)


def test_the_index_is_loaded_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe loads what the writer published, and every lookup finds the known half of its chain."""
    monkeypatch.setattr(index, "QUICK_SIZES", {"10k": 10_240})
    results = Results()
    index.run(ScenarioResults(results, "index"), BRIEF)
    assert {figure.key.case for figure in results.of("index")} == {
        "10k blocks",
        "10k blocks, a burst of 100,000 events",
        *(f"lookup of {depth} blocks, 10k in the index" for depth in index.DEPTHS),
    }
    assert all(figure.median > 0 for figure in results.of("index"))


def test_the_router_forwards_between_sink_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real router finds the sources, and no stream, request or position is lost in any case."""
    monkeypatch.setattr(windows, "QUICK_CASES", (windows.Case(8, 20),))
    results = Results(aims.AIMS)
    router.run(ScenarioResults(results, "router"), BRIEF)
    assert Key("router", "8 streams, 20 ms", aims.PER_TOKEN) in results.figures
    assert Key("router", aims.RATE_200, aims.PER_REQUEST) in results.figures
    assert not [problem for problem in results.problems if "failed" in problem]
