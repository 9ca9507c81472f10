"""The rows of the comparison of placement: the full grid, chosen and sampled rows of it, rows with faults. Pure."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.catalogue import POLICIES
from simulator.processes import Task
from simulator.runs import BOUND, ReplayRow
from simulator.servers import ServiceOrder

GRID_TRACES: Final = ("conv", "tool")
TRACES: Final = {"conv": "conversation_head", "tool": "toolagent_like_dev", "mixed": "mixed_lengths"}
LARGE: Final = 64
"""Replicas from which on copies of a trace's head are overlaid: one copy would hardly load them."""

LARGE_COPIES: Final = 4
LARGE_REQUESTS: Final = 3000
SEEDS: Final = (1, 2, 3)
TAIL_SEEDS: Final = (1, 2, 3, 4, 5)
"""Seeds of the rows of the tail: a p99 rests on a hundredth of the requests."""
OURS: Final = "kvmesh"
REFERENCE: Final = "kappa-rho"
"""The policy in the comparison of kvmesh's tail."""

TAIL_POLICIES: Final = (OURS, REFERENCE, "ttft-opt", "preble", "llm-d", "ttft")
"""Policies in the comparison of tails."""
NAMES: Final = (*POLICIES, BOUND)
AHEAD_S: Final = 1.0
STALE: Final = {"delay_s": 0.1, "loss": 0.05, "routers": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the record."""

    trace: str
    row: ReplayRow

    @property
    def is_stale(self) -> bool:
        """True if routers receive information late and incompletely."""
        return self.row.routers > 1

    @property
    def name(self) -> str:
        """Return the name of the row in the record."""
        row = self.row
        state = "stale" if self.is_stale else "exact"
        ahead = "hold" if math.isfinite(row.dispatch_ahead_s) else "at once"
        name = (
            f"{self.trace}, {row.replicas} replicas, load {row.load:g}, cache {row.cache:g}, {state}, "
            f"{row.order.value}, {ahead}"
        )
        if row.slowness != 1:
            name += f", one {row.slowness:g} times as slow"
        if row.outage_s:
            name += f", after restarts of {row.outage_s:g} s"
        return name

    @property
    def source(self) -> str:
        """Return the key of the replayed trace."""
        return f"{self.trace}-head" if self.row.copies > 1 else self.trace

    def tasks(self) -> list[Task]:
        """Return all runs. Only kvmesh holds requests back; other policies run without `hold`."""
        return self._tasks(NAMES, SEEDS)

    def tail_tasks(self) -> list[Task]:
        """Return the runs for the tail of this row."""
        return self._tasks(TAIL_POLICIES, TAIL_SEEDS)

    def _tasks(self, policies: Sequence[str], seeds: Sequence[int]) -> list[Task]:
        at_once = replace(self.row, dispatch_ahead_s=math.inf)
        return [
            Task(self.source, self.row if policy == OURS else at_once, policy, seed)
            for policy in policies
            for seed in seeds
        ]


def _case(
    trace: str,
    replicas: int,
    load: float,
    cache: float,
    order: ServiceOrder,
    *,
    stale: bool = False,
    hold: bool = False,
    slowness: float = 1.0,
    outage_s: float = 0.0,
) -> Case:
    row = ReplayRow(replicas, load, cache, order=order, copies=LARGE_COPIES if replicas >= LARGE else 1)
    if stale:
        row = replace(row, delay_s=STALE["delay_s"], loss=STALE["loss"], routers=int(STALE["routers"]))
    if hold:
        row = replace(row, dispatch_ahead_s=AHEAD_S)
    row = replace(row, slowness=slowness, outage_s=outage_s)
    return Case(trace, row)


def full() -> list[Case]:
    """Return every row."""
    return [
        _case(trace, replicas, load, cache, order, stale=stale, hold=hold)
        for replicas, trace, cache, load, order, stale, hold in itertools.product(
            (4, 8, 16, LARGE),
            GRID_TRACES,
            (0.05, 0.3, 1.0),
            (0.5, 0.7, 0.85),
            ServiceOrder,
            (False, True),
            (False, True),
        )
    ]


def sampled_rows() -> list[Case]:
    """Return every row of the grid in a random but fixed order: the first rows are a sample of the grid."""
    return sorted(full(), key=lambda case: hashlib.sha256(case.name.encode()).digest())


def chosen_rows() -> list[Case]:
    """Return a row of every kind."""
    fifo, shortest = ServiceOrder.FIFO, ServiceOrder.SHORTEST
    return [
        *(
            _case(trace, 8, load, 0.3, order)
            for order in ServiceOrder
            for trace in GRID_TRACES
            for load in (0.7, 0.85)
        ),
        _case("conv", 8, 0.85, 0.3, shortest, hold=True),
        _case("tool", 8, 0.7, 0.3, fifo, hold=True),
        _case("conv", 8, 0.7, 0.3, shortest, stale=True),
        _case("tool", 8, 0.85, 0.3, shortest, stale=True),
        _case("conv", 4, 0.85, 0.05, shortest),
        _case("tool", 16, 0.5, 1.0, shortest),
        _case("conv", LARGE, 0.7, 0.3, shortest),
    ]


def fault_rows() -> list[Case]:
    """Return rows outside the grid: a third trace, a slow replica, restarts."""
    fifo, shortest = ServiceOrder.FIFO, ServiceOrder.SHORTEST
    return [
        _case("mixed", 8, 0.7, 0.3, shortest),
        _case("mixed", 8, 0.85, 0.3, shortest),
        _case("mixed", 8, 0.85, 0.3, fifo),
        _case("mixed", 8, 0.85, 0.3, shortest, hold=True),
        _case("mixed", 16, 0.85, 0.3, shortest, stale=True),
        _case("conv", 8, 0.7, 0.3, shortest, slowness=2.0),
        _case("tool", 8, 0.7, 0.3, shortest, hold=True, slowness=2.0),
        _case("mixed", 8, 0.7, 0.3, shortest, hold=True, slowness=2.0),
        *(_case(trace, 8, 0.7, 0.3, shortest, hold=True, outage_s=2.0) for trace in TRACES),
        *(_case(trace, 8, 0.7, 0.3, shortest, hold=True, outage_s=30.0) for trace in TRACES),
        _case("conv", 8, 0.85, 0.3, shortest, outage_s=30.0),
    ]


def tails() -> list[Case]:
    """Return the rows of the tail."""
    return [*chosen_rows(), *fault_rows()]
