"""The bench's own processes: counted right, steered right, gone afterwards."""

from __future__ import annotations

import os
import sys

import pytest

from bench import accounting, windows
from bench.processes import ANY_CORE, Fleet
from bench.results import BenchError, Results, ScenarioResults
from bench.scenarios import floor
from tests.patience import Patience

SPIN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint('{}')\ninput()"


def test_cpu_time_of_another_process_is_exact() -> None:
    """A process that burnt 200 ms of its own clock is charged that, and little more than its start-up."""
    with Fleet() as fleet:
        child = fleet.start("spin", [sys.executable, "-S", "-c", SPIN], ANY_CORE)
        child.read_answer(30)
        assert 0.2e9 <= accounting.cpu_ns(child.pid) < 1e9
        assert accounting.rss_bytes(child.pid) > 1_000_000
        assert child.pid in accounting.descendants(os.getpid())
    with pytest.raises(ProcessLookupError):
        accounting.cpu_ns(child.pid)


def test_a_process_tells_its_addresses() -> None:
    """That of HTTP is a frontend's alone."""
    lines = ('{"address": "h:1", "http_address": "h:2"}', '{"address": "h:1"}')
    with Fleet() as fleet:
        started = [fleet.start("x", ["sh", "-c", f"echo '{line}'; read x"], ANY_CORE) for line in lines]
        for one in started:
            one.wait_ready()
    assert [(one.address, one.http_address) for one in started] == [("h:1", "h:2"), ("h:1", "")]


def test_a_dead_neighbour_is_an_error_with_its_last_words() -> None:
    """A neighbour that dies at start says why."""
    with Fleet() as fleet, pytest.raises(BenchError, match="--role"):
        fleet.start_ready("source", "bench.source")


def test_source_and_sink_hold_their_rate() -> None:
    """With nothing between them, every paced token arrives, in one frame per step, and short requests finish."""
    with Fleet() as fleet:
        source = fleet.start_ready("source", "bench.source", ANY_CORE, role="router", id_="s")
        sink = fleet.start_ready("sink", "bench.sink", ANY_CORE, target=source.address)
        sink.ask("open", streams=8, prompt=70, tokens=30)
        bound = Patience(20)
        while (counters := sink.ask("counters"))["finished"] < 8:
            assert not bound.is_over, counters
        assert counters["tokens"] == 8 * 30
        assert counters["first_tokens"] == 8
        assert counters["frames"] < 8 * 29 / 2
        assert (counters["failed"], source.ask("counters")["live"]) == (0, 0)


def test_a_scenario_fills_the_results() -> None:
    """The floor adds a figure for each case and sees no failure."""
    results = Results()
    pace = windows.Pace(1, 0.1, 0.3, 0.3, is_quick=True, is_full=False)
    floor.run(ScenarioResults(results, "floor"), pace)
    assert {figure.key.case for figure in results.of("floor")} >= {str(case) for case in windows.QUICK_CASES}
    assert all(value > 0 for figure in results.of("floor") for value in figure.values)
    assert not [text for text in results.problems if "failed" in text]
