"""The plan of a replay: the requested comparison and sizing, and the runs for them. Pure but for the injected runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

from simulator.cost import Cost
from simulator.measured import MeasuredCost
from simulator.measures import Measures
from simulator.options import Cache
from simulator.processes import OnDone, Task
from simulator.runs import Replay, ReplayRow
from simulator.sizing import Search
from simulator.trace import Trace

SEED = 1
"""The first seed."""

SHORT: Final = 5
"""A trace should last this many times its longest prefill. In a shorter trace queues still grow at the end."""


class Runs(Protocol):
    """Runs tasks."""

    def run(self, tasks: Sequence[Task], on_done: OnDone) -> None:
        """Run all tasks."""
        ...


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of the comparison."""

    row: ReplayRow
    cache: Cache
    capacity: int
    """Blocks per replica."""
    requests_per_s: float
    policies: Mapping[str, Sequence[Measures]]
    """One entry per seed."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The result of sizing for one amount of cache."""

    cache: Cache
    capacity: int | None
    """Blocks per replica; None if the search found no number of replicas."""
    search: Search


@dataclass(frozen=True)
class Plan:
    """The requested comparison and sizing."""

    trace: Trace
    cost: Cost
    row: ReplayRow
    """The common values of all rows."""
    replicas: Sequence[int]
    loads: Sequence[float]
    caches: Sequence[Cache]
    policies: Sequence[str]
    """The first one is the policy of the sizing."""
    seeds: int
    sizes: Sequence[Cache]
    """Empty: no sizing."""
    goodput: float
    measured: MeasuredCost | None = None
    """Source of the costs, if a router measured them."""

    @cached_property
    def replay(self) -> Replay:
        """The trace, for values that need no other process."""
        return Replay(self.trace)

    @property
    def run_count(self) -> int:
        """Number of runs of the comparison."""
        rows = len(self.replicas) * len(self.caches) * len(self.loads)
        return rows * len(self.policies) * self.seeds

    def row_of(self, replicas: int, cache: Cache, load: float | None) -> ReplayRow:
        """Return the row with these values."""
        blocks = cache.blocks(self.cost, self.trace.block_tokens)
        return replace(
            self.row, replicas=replicas, load=load, cache=cache.share, cache_blocks=blocks, cost=self.cost
        )

    def compare(self, runner: Runs, on_run: Callable[[], None]) -> list[Compared]:
        """Run every policy on every row. `on_run` is called after each run."""
        found: dict[Task, Measures] = {}

        def done(task: Task, measures: Measures) -> None:
            found[task] = measures
            on_run()

        rows = [
            (cache, self.row_of(replicas, cache, load))
            for replicas in self.replicas
            for cache in self.caches
            for load in self.loads
        ]
        seeds = range(SEED, SEED + self.seeds)
        name = self.trace.name
        runner.run(
            [Task(name, row, policy, seed) for _, row in rows for policy in self.policies for seed in seeds],
            done,
        )
        return [
            Compared(
                row,
                cache,
                self._capacity(row),
                self._requests_per_s(row),
                {
                    policy: [found[Task(name, row, policy, seed)] for seed in seeds]
                    for policy in self.policies
                },
            )
            for cache, row in rows
        ]

    def size(self, runner: Runs, on_run: Callable[[], None]) -> list[Sized]:
        """Find the smallest number of replicas for each amount of cache."""
        load = self.replay.workload(SEED, self.row.copies)
        searches: list[Search] = []
        for cache in self.sizes:
            row = self.row_of(1, cache, None)
            work_s = self.replay.pooled(row, SEED).work_s
            searches.append(Search(self.goodput, math.ceil(work_s * self.row.speed / load.span_s)))
        while True:
            tasks: dict[Task, Search] = {}
            for cache, search in zip(self.sizes, searches, strict=True):
                count = search.next()
                if count is not None:
                    row = self.row_of(count, cache, None)
                    tasks[Task(self.trace.name, row, self.policies[0], SEED)] = search
            if not tasks:
                break

            def done(task: Task, measures: Measures, tasks: dict[Task, Search] = tasks) -> None:
                tasks[task].tried[task.row.replicas] = measures
                on_run()

            runner.run(list(tasks), done)
        return [
            Sized(
                cache,
                self._capacity(self.row_of(search.found, cache, None)) if search.found is not None else None,
                search,
            )
            for cache, search in zip(self.sizes, searches, strict=True)
        ]

    def headlines(self) -> list[str]:
        """Return the description of the trace, and of measured costs."""
        about = self.measured.sentences(self.trace.longest_tokens) if self.measured is not None else []
        return [self._headline(), *about]

    def _headline(self) -> str:
        load = self.replay.workload(SEED, self.row.copies)
        tokens = sum(load.tokens) / len(load)
        return (
            f"{self.trace.name}: {len(load):,} requests in {load.span_s:,.0f} s ({len(load) / load.span_s:.2f}/s), "
            f"{tokens:,.0f} prompt tokens each, {load.unique_blocks:,} different blocks "
            f"({self.cost.gib(load.unique_blocks, load.block_tokens):,.0f} GiB); prefill as {self.cost.name}, "
            f"{self.row.order.value}"
        )

    def pace(self) -> str:
        """Return in words the rate of requests in the sizing."""
        load = self.replay.workload(SEED, self.row.copies)
        rate = len(load) / load.span_s * self.row.speed
        return f"{self._times()}, {f'{rate:.3g}' if rate < 1000 else f'{rate:,.0f}'} requests/s"

    def warnings(self, compared: Sequence[Compared]) -> list[str]:
        """Return a warning if the trace is so short at some load that queues hardly begin to build up."""
        longest_s = self.cost.seconds(self.trace.longest_tokens, self.trace.longest_tokens)
        load = self.replay.workload(SEED, self.row.copies)
        spans = [
            (len(load) / one.requests_per_s, f"{one.row.replicas} replicas and load {one.row.load:g}")
            for one in compared
        ]
        if self.sizes:
            spans.append((load.span_s / self.row.speed, self._times()))
        span_s, where = min(spans)
        if span_s >= SHORT * longest_s:
            return []
        limit = f"less than {SHORT} times its longest prefill ({longest_s:.3g} s)"
        return [f"Trace too short: at {where} it lasts {span_s:.3g} s, {limit}."]

    def _times(self) -> str:
        return f"{f'{self.row.speed:g} times ' if self.row.speed != 1 else ''}the trace's rate"

    def described(self) -> dict[str, Any]:
        """Return the description of the trace by name."""
        load = self.replay.workload(SEED, self.row.copies)
        return {
            "trace": self.trace.name,
            "requests": len(load),
            "span_s": load.span_s,
            "prompt_tokens": sum(load.tokens),
            "unique_blocks": load.unique_blocks,
            "block_tokens": load.block_tokens,
            "kv_bytes_per_token": self.cost.kv_bytes,
            "slo_s": self.cost.slo_floor_s,
            "speed": self.row.speed,
            "measured": None if self.measured is None else self.measured.as_dict(),
        }

    def _capacity(self, row: ReplayRow) -> int:
        return row.capacity(self.replay.workload(SEED, row.copies))

    def _requests_per_s(self, row: ReplayRow) -> float:
        load = self.replay.workload(SEED, row.copies)
        return len(load) / (load.span_s * self.replay.scale(row, SEED))
