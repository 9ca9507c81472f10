"""The two traces of the record, and a replayed slice of them, against published facts."""

from __future__ import annotations

import math

import pytest

from bench.routing.rows import TRACES, chosen_rows, full
from kvmesh.config import ROOT
from simulator.cost import COSTS
from simulator.pooled import pool
from simulator.runs import BOUND, Replay, ReplayRow
from simulator.trace import Trace, read
from simulator.workload import workload


def trace(name: str) -> Trace:
    """Return one of the traces."""
    return read(ROOT / "bench" / "traces" / f"{TRACES[name]}.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "requests", "unique", "longest", "hit"),
    [("conv", 4812, 83_443, 241, 0.336), ("tool", 5000, 34_567, 231, 0.564)],
)
def test_traces_are_as_their_makers_say(
    name: str, requests: int, unique: int, longest: int, hit: float
) -> None:
    """Requests, unique blocks, the longest prompt and the hit ratio of an infinite cache match the
    publication.
    """
    load = workload(trace(name), 1)
    pooled = pool(load, math.inf, COSTS["8b"])
    assert (len(load), load.unique_blocks, load.longest_blocks) == (requests, unique, longest)
    assert sum(pooled.hit_blocks) / sum(map(len, load.hashes)) == pytest.approx(hit, abs=0.001)


def test_a_slice_orders_policies_as_the_whole_does() -> None:
    """With heavy reuse at load 0.7, policies rank: the bound, kvmesh, cache-aware, cache-blind."""
    replay = Replay(trace("tool").head(1200))
    order = [BOUND, "kvmesh", "ttft", "round-robin"]
    means = [replay.run(ReplayRow(8, 0.7), policy, 1).mean_s for policy in order]
    assert means == sorted(means)


def test_rows_of_the_record_are_all_different_and_the_short_ones_are_of_the_grid() -> None:
    """Rows of the record are unique, and the chosen ones are in the grid.

    So results of the short run count for the long one.
    """
    assert len(chosen_rows()) == len(set(chosen_rows())) == 15
    assert len(full()) == len(set(full())) == 4 * 2 * 3 * 3 * 2 * 2 * 2
    assert set(chosen_rows()) <= set(full())
    assert len({case.name for case in full()}) == len(full())
