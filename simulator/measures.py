"""The measures of a simulated run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

from simulator.cost import Cost
from simulator.workload import Workload

WARM_UP: Final = 0.1
"""Share of the requests, from the first on, with times that do not count."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of one run, or the mean of several. Times to first token (TTFT) in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    goodput: float
    """Share of requests with a first token in time (Cost.slo_s)."""
    hit: float
    """Blocks found in cache over all blocks."""
    imbalance: float
    """Work of the busiest replica over the mean."""
    work: float
    """Busy seconds over those of one pooled cache that serves in order."""
    busy: float
    """Share of the time in which a replica works, on average, up to the first token of the last request."""
    wrong: float = 0.0
    """Wrong hits: blocks that the router expected in cache and the replica did not find, over all blocks."""

    def as_dict(self) -> dict[str, float]:
        """Return the measures by name."""
        return asdict(self)


NAMES: Final = tuple(one.name for one in fields(Measures))


def measure(
    load: Workload,
    cost: Cost,
    ttft_s: Sequence[float],
    hit_blocks: Sequence[int],
    busy_s: Sequence[float],
    work_s: float,
    span_s: float,
    counted: Sequence[int] | None = None,
    expected_blocks: Sequence[int] = (),
) -> Measures:
    """Compute the measures of one run.

    `ttft_s`, `hit_blocks`: by request. `busy_s`: by replica. `work_s`: busy seconds of the pooled cache. `span_s`: seconds
    from the first arrival to the last. `counted`: the requests with times that count; None: all after the warm-up.
    `expected_blocks`: expected hits by request; empty: none was expected.
    """
    if counted is None:
        counted = range(int(len(load) * WARM_UP), len(load))
    ordered = sorted(ttft_s[index] for index in counted)
    good = sum(ttft_s[index] <= cost.slo_s(load.tokens[index]) for index in counted)
    blocks = sum(len(hashes) for hashes in load.hashes)
    total = sum(busy_s)
    wrong = sum(max(0, wanted - hit) for wanted, hit in zip(expected_blocks, hit_blocks, strict=False))
    return Measures(
        mean_s=sum(ordered) / len(ordered),
        p50_s=_quantile(ordered, 0.50),
        p90_s=_quantile(ordered, 0.90),
        p99_s=_quantile(ordered, 0.99),
        max_s=ordered[-1],
        goodput=good / len(counted),
        hit=sum(hit_blocks) / blocks,
        imbalance=max(busy_s) * len(busy_s) / total,
        work=total / work_s,
        busy=total / len(busy_s) / (span_s + ttft_s[-1]),
        wrong=wrong / blocks,
    )


def mean(runs: Sequence[Measures]) -> Measures:
    """Return the mean over runs that differ in their seed."""
    return Measures(**{name: statistics.fmean(getattr(run, name) for run in runs) for name in NAMES})


def spread(runs: Sequence[Measures]) -> Measures:
    """Return half the distance between the largest and the smallest value of each measure."""
    return Measures(
        **{
            name: (max(getattr(run, name) for run in runs) - min(getattr(run, name) for run in runs)) / 2
            for name in NAMES
        }
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
