"""Placement decisions: the cost of placing one prompt of 64 blocks, by replicas and by blocks in the index.

The process under test is this module as a process, with a policy, an index and a backlog of simulated replicas in
memory. It is alone in its process, because memory is measured by the growth of the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from bench import accounting, aims, control
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults, quantile
from bench.scenarios.index import block_hash
from bench.windows import Pace
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import (
    Dispatched,
    Finished,
    Hit,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaState,
    Started,
)

FILL_TIMEOUT_S = 300.0
REPLICAS = (8, 64, 1000)
SIZES = {"10k": 10_240, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_REPLICAS = (8, 1000)
REQUESTS = 600
ROUTER = "router-0"
BLOCK_TOKENS = 32
PROMPT_BLOCKS = 64
CHAIN_BLOCKS = 64
BLOCKS_MAX = 20_000_000
"""Bound of the local index, above every size measured."""

SYSTEM_PROMPTS = 50
SYSTEM_BLOCKS = 16
"""Blocks of each system prompt. A random half of the replicas holds them."""

SHARED_CHAINS = 10
"""One of this many chains is held by a second replica."""

BACKLOG = 2
"""Dispatched prompts per prefill replica, one of them running."""

EXPIRES_S = 1e9
WARM_UP = 50


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    for name, blocks in (FULL_SIZES if pace.is_full else SIZES).items():
        for replicas in QUICK_REPLICAS if pace.is_quick else REPLICAS:
            with Fleet() as fleet:
                probe = fleet.start_ready("policy", __name__, TEST_CORE)
                filled = probe.ask("fill", replicas=replicas, blocks=blocks, timeout_s=FILL_TIMEOUT_S)
                decided = probe.ask("decide", requests=REQUESTS, timeout_s=FILL_TIMEOUT_S)
            case = aims.placement_case(replicas, name)
            if blocks > SIZES["10k"]:  # with fewer blocks, other growth of the process dominates
                results.add(case, "memory per block", "bytes", filled["bytes_per_block"])
            results.add(case, aims.DECISION, "us", decided["p50_us"])
            results.add(case, "CPU of a decision, p99", "us", decided["p99_us"])
            results.add(case, "CPU of the policy's updates for a request, p50", "us", decided["lesson_us"])


class PlacementProbe:
    """A policy, its replicas, and their prompts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._local_index = LocalPrefixIndex(BLOCKS_MAX)
        self._policy = CostPolicy(
            ROUTER,
            self._local_index,
            self._draw,
            block_tokens=BLOCK_TOKENS,
            dispatch_ahead_s=60.0,
            local_prefill_tokens_max=64,
        )
        self._view = PoolView((), ())
        self._chains = 0
        self._now_s = 1000.0
        self._working: deque[tuple[str, tuple[int, ...], float]] = deque()
        """Request, hashes and prefill seconds of dispatched prompts, the oldest first."""
        self._request_total = 0

    async def fill(self, replicas: int, blocks: int) -> Mapping[str, Any]:
        """Create {replicas}, half of them prefill, with {blocks} in all. Return the memory per block."""
        prefill = [f"prefill-{index}" for index in range(replicas // 2)]
        decode = [f"decode-{index}" for index in range(replicas - replicas // 2)]
        self._view = PoolView(
            [ReplicaState(name, 100_000) for name in prefill],
            [ReplicaState(name, 100_000) for name in decode],
        )
        names = prefill + decode
        for name in names:
            self._local_index.add(name)
        gc.collect()
        before = accounting.rss_bytes(os.getpid())
        for prompt in range(SYSTEM_PROMPTS):
            for name in self._draw.sample(names, len(names) // 2):
                self._local_index.store(name, _hashes(-1 - prompt, SYSTEM_BLOCKS))
        self._chains = blocks // CHAIN_BLOCKS
        for chain in range(self._chains):
            hashes = _hashes(chain, CHAIN_BLOCKS)
            self._local_index.store(self._draw.choice(names), hashes)
            if not chain % SHARED_CHAINS:
                self._local_index.store(self._draw.choice(names), hashes[: CHAIN_BLOCKS // 2])
        for _ in self._local_index.maintain():
            pass
        gc.collect()
        grown = accounting.rss_bytes(os.getpid()) - before
        for _ in range(BACKLOG * len(prefill)):
            self._dispatch(self._request(), self._draw.choice(prefill), 0.2)
        gc.freeze()  # as a router does before it serves
        return {"bytes_per_block": grown / self._local_index.block_count}

    async def decide(self, requests: int) -> Mapping[str, Any]:
        """Place {requests} and report their progress. Return CPU in us: of a decision, and of the policy's updates."""
        decisions_us, lessons_us = [], []
        for index in range(requests + WARM_UP):
            request = self._request()
            self._now_s += 0.2 / max(1, len(self._view.prefill))
            started_ns = time.thread_time_ns()
            placement = self._policy.place(request, self._view, self._now_s)
            decided_ns = time.thread_time_ns()
            if not isinstance(placement, Placement):
                raise RuntimeError(f"nothing was placed: {placement}")
            where = placement.prefill or self._draw.choice(self._view.prefill).name
            self._dispatch(request, where, placement.prefill_s)
            self._finish_oldest()
            learnt_ns = time.thread_time_ns()
            if index >= WARM_UP:
                decisions_us.append((decided_ns - started_ns) / 1e3)
                lessons_us.append((learnt_ns - decided_ns) / 1e3)
            if not index % 20:
                await asyncio.sleep(0)
        self._policy.assert_consistent()
        return {
            "p50_us": quantile(decisions_us, 0.5),
            "p99_us": quantile(decisions_us, 0.99),
            "lesson_us": quantile(lessons_us, 0.5),
        }

    def _request(self) -> PlacementRequest:
        """Return a prompt: in turn one that continues a conversation, one with a known system prompt, a new one."""
        self._request_total += 1
        kind, known = self._request_total % 3, _hashes(0, 0)
        if kind == 0 and self._chains:
            known = _hashes(self._draw.randrange(self._chains), PROMPT_BLOCKS * 3 // 4)
        elif kind == 1:
            known = _hashes(-1 - self._draw.randrange(SYSTEM_PROMPTS), SYSTEM_BLOCKS)
        fresh = tuple(self._draw.getrandbits(64) for _ in range(PROMPT_BLOCKS - len(known)))
        return PlacementRequest(
            f"request-{self._request_total}", known + fresh, PROMPT_BLOCKS * BLOCK_TOKENS + 5, 200
        )

    def _dispatch(self, request: PlacementRequest, where: str, prefill_s: float) -> None:
        hashes = tuple(request.hashes)
        times = (prefill_s, self._now_s, self._now_s + EXPIRES_S)
        self._policy.observe(Dispatched(ROUTER, request.request_id, where, hashes, *times))
        self._working.append((request.request_id, hashes, prefill_s))

    def _finish_oldest(self) -> None:
        name, hashes, prefill_s = self._working.popleft()
        tokens = len(hashes) * BLOCK_TOKENS
        hit = Hit(tokens // 4, tokens - tokens // 4, len(hashes) // 4, prefill_s)
        self._policy.observe(Finished(ROUTER, name, self._now_s, hit))
        if len(self._working) > len(self._view.prefill):
            started = self._working[len(self._working) - len(self._view.prefill) - 1][0]
            self._policy.observe(Started(ROUTER, started, self._now_s))


def _hashes(chain: int, count: int) -> tuple[int, ...]:
    return tuple(block_hash(chain, depth) for depth in range(count))


async def serve(seed: int = 1) -> None:
    """Serve until stdin ends."""
    probe = PlacementProbe(seed)
    await control.serve_commands(probe.fill, probe.decide)


if __name__ == "__main__":
    control.main(serve, __doc__)
