"""One row of a comparison, and the run of a policy on it. Pure.

A row holds everything but the policy and the seed. Equal (row, policy, seed) give equal figures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from simulator.catalogue import POLICIES
from simulator.cost import COSTS, Cost
from simulator.measures import Measures, measure
from simulator.pooled import Pooled, bound, capacity_of, pool, scale_for
from simulator.rivals.base import PolicySetup
from simulator.servers import ServiceOrder
from simulator.simulation import Cluster, ReplicaOutage, Simulation
from simulator.trace import Trace
from simulator.workload import Workload, workload

BOUND = "one-queue"
"""Not a policy: one queue and one pooled cache for all replicas, first come, first served."""


RESTARTS: Final = (0.2, 0.45, 0.7)
"""Shares of the trace after which a replica is lost."""

AFTER_S: Final = 60.0
"""Seconds after the end of an outage in which arriving requests are measured."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """The conditions of a replay."""

    replicas: int = 8
    load: float | None = 0.7
    """Work of a pooled cache over the capacity of the replicas; None: the trace's own rate."""
    cache: float = 0.3
    """Share of the trace's unique blocks that all caches together hold, if `cache_blocks` is 0."""
    cache_blocks: int = 0
    """Blocks per replica."""
    order: ServiceOrder = ServiceOrder.FIFO
    routers: int = 1
    delay_s: float = 0.0
    """Delay until a router hears of events other than its own dispatches."""
    loss: float = 0.0
    """Share of the cache events that a router never hears."""
    dispatch_ahead_s: float = float("inf")
    """Unstarted work that kvmesh dispatches to a replica; infinite: requests are dispatched at once."""
    copies: int = 1
    """Copies of the trace that are overlaid. They share the most common first block alone."""
    speed: float = 1.0
    """Factor on the trace's own rate, where `load` is None."""
    cost: Cost = COSTS["8b"]
    slowness: float = 1.0
    """Factor on the prefill time at the first replica."""
    outage_s: float = 0.0
    """Above 0: one replica after the other has an outage of this length, at RESTARTS. The AFTER_S after each count."""
    has_events: bool = True
    """False: engines without KV events. Routers believe their blocks. Only kvmesh can be run so."""
    unseen: float = 0.0
    """Blocks that each prompt leaves in the cache unknown to routers, over its own blocks."""

    def capacity(self, load: Workload) -> int:
        """Return the blocks of cache per replica."""
        return self.cache_blocks or capacity_of(load, self.cache, self.replicas)


class Replay:
    """Replays one trace many times. Caches the values that rows share."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._loads: dict[tuple[int, int], Workload] = {}
        self._pooled: dict[tuple[int, int, float, Cost], Pooled] = {}

    def workload(self, seed: int, copies: int = 1) -> Workload:
        """Return the workload of `seed`."""
        if (seed, copies) not in self._loads:
            self._loads[seed, copies] = workload(self._trace, seed, copies)
        return self._loads[seed, copies]

    def pooled(self, row: ReplayRow, seed: int) -> Pooled:
        """Return the workload served from one cache as large as all caches of the row."""
        load = self.workload(seed, row.copies)
        capacity = row.replicas * row.capacity(load)
        key = (seed, row.copies, capacity, row.cost)
        if key not in self._pooled:
            self._pooled[key] = pool(load, capacity, row.cost)
        return self._pooled[key]

    def scale(self, row: ReplayRow, seed: int) -> float:
        """Return the factor on arrival times."""
        if row.load is None:
            return 1.0 / row.speed
        work_s = self.pooled(row, seed).work_s
        return scale_for(self.workload(seed, row.copies), work_s, row.replicas, row.load)

    def run(self, row: ReplayRow, policy: str, seed: int) -> Measures:
        """Return the measures of `policy` on `row`."""
        load, pooled = self.workload(seed, row.copies), self.pooled(row, seed)
        scale = self.scale(row, seed)
        span_s = load.span_s * scale
        if policy == BOUND:
            ttft_s, busy_s = bound(load, pooled, scale, row.replicas)
            return measure(load, row.cost, ttft_s, pooled.hit_blocks, busy_s, pooled.work_s, span_s)
        outages = restarts(row.replicas, row.outage_s, span_s)
        cluster = Cluster(
            row.replicas,
            row.capacity(load),
            row.cost,
            row.order,
            row.delay_s,
            row.loss,
            row.slowness,
            outages,
            row.has_events,
            row.unseen,
        )
        setup = PolicySetup(
            cluster.names(),
            cluster.capacity,
            load.block_tokens,
            row.cost,
            random.Random(f"{seed}/{policy}"),
            dispatch_ahead_s=row.dispatch_ahead_s,
            order=row.order,
        )
        policies = [
            POLICIES[policy](
                replace(setup, router=f"router-{index}", rng=random.Random(f"{seed}/{policy}/{index}"))
            )
            for index in range(row.routers)
        ]
        result = Simulation(load, scale, cluster, policies, random.Random(f"{seed}/loss")).run()
        return measure(
            load,
            row.cost,
            result.ttft_s,
            result.hit_blocks,
            result.busy_s,
            pooled.work_s,
            span_s,
            _counted(load, scale, outages),
            result.expected_blocks,
        )


def restarts(replicas: int, outage_s: float, span_s: float) -> list[ReplicaOutage]:
    """Return the outages, spread over `span_s`; none if `outage_s` is 0."""
    if not outage_s:
        return []
    return [
        ReplicaOutage((1 + index) % replicas, share * span_s, share * span_s + outage_s)
        for index, share in enumerate(RESTARTS)
    ]


def _counted(load: Workload, scale: float, outages: Sequence[ReplicaOutage]) -> list[int] | None:
    """Return the requests that come in the minute after an outage; None without outages."""
    if not outages:
        return None
    return [
        index
        for index, at_s in enumerate(load.arrivals_s)
        if any(0 <= at_s * scale - one.until_s < AFTER_S for one in outages)
    ]
