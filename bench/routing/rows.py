"""What placement is compared on: the full grid, fifteen rows of it, and rows drawn from it. Pure."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

from services.router.replay.catalogue import POLICIES
from services.router.replay.processes import Task
from services.router.replay.runs import BOUND, Row
from services.router.replay.servers import Order

TRACES: Final = {"conv": "conversation_head", "tool": "toolagent_like_dev"}
LARGE: Final = 64
"""Replicas for which copies of a trace's head are laid over each other: one alone would hardly load them."""

LARGE_COPIES: Final = 4
LARGE_REQUESTS: Final = 3000
SEEDS: Final = (1, 2, 3)
OURS: Final = "kvmesh"
NAMES: Final = (*POLICIES, BOUND)
AHEAD_S: Final = 1.0
STALE: Final = {"delay_s": 0.1, "loss": 0.05, "routers": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the record."""

    trace: str
    row: Row

    @property
    def is_stale(self) -> bool:
        """True if routers hear late, and not everything."""
        return self.row.routers > 1

    @property
    def name(self) -> str:
        """Return what it is called in the record."""
        row = self.row
        state = "stale" if self.is_stale else "exact"
        ahead = "hold" if math.isfinite(row.dispatch_ahead_s) else "at once"
        return (
            f"{self.trace}, {row.replicas} replicas, load {row.load:g}, cache {row.cache:g}, {state}, "
            f"{row.order.value}, {ahead}"
        )

    @property
    def source(self) -> str:
        """Return the key of the trace that is replayed."""
        return f"{self.trace}-head" if self.row.copies > 1 else self.trace

    def tasks(self) -> list[Task]:
        """Return all runs. Only kvmesh holds requests back: what others do is the same with it and without."""
        at_once = replace(self.row, dispatch_ahead_s=math.inf)
        return [
            Task(self.source, self.row if policy == OURS else at_once, policy, seed)
            for policy in NAMES
            for seed in SEEDS
        ]


def _case(
    trace: str,
    replicas: int,
    load: float,
    cache: float,
    order: Order,
    *,
    stale: bool = False,
    hold: bool = False,
) -> Case:
    row = Row(replicas, load, cache, order=order, copies=LARGE_COPIES if replicas >= LARGE else 1)
    if stale:
        row = replace(row, delay_s=STALE["delay_s"], loss=STALE["loss"], routers=int(STALE["routers"]))
    if hold:
        row = replace(row, dispatch_ahead_s=AHEAD_S)
    return Case(trace, row)


def full() -> list[Case]:
    """Return every row."""
    return [
        _case(trace, replicas, load, cache, order, stale=stale, hold=hold)
        for replicas, trace, cache, load, order, stale, hold in itertools.product(
            (4, 8, 16, LARGE), TRACES, (0.05, 0.3, 1.0), (0.5, 0.7, 0.85), Order, (False, True), (False, True)
        )
    ]


def drawn() -> list[Case]:
    """Return every row in an order that has nothing to do with what is in it: its first rows stand for the grid."""
    return sorted(full(), key=lambda case: hashlib.sha256(case.name.encode()).digest())


def fifteen() -> list[Case]:
    """Return a row of every kind."""
    fifo, shortest = Order.FIFO, Order.SHORTEST
    return [
        *(_case(trace, 8, load, 0.3, order) for order in Order for trace in TRACES for load in (0.7, 0.85)),
        _case("conv", 8, 0.85, 0.3, shortest, hold=True),
        _case("tool", 8, 0.7, 0.3, fifo, hold=True),
        _case("conv", 8, 0.7, 0.3, shortest, stale=True),
        _case("tool", 8, 0.85, 0.3, shortest, stale=True),
        _case("conv", 4, 0.85, 0.05, shortest),
        _case("tool", 16, 0.5, 1.0, shortest),
        _case("conv", LARGE, 0.7, 0.3, shortest),
    ]
