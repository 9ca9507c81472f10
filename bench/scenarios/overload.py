"""Open-loop load beyond capacity: goodput, refusals by load shedding, and the attempts that retries add.

Two prefill replicas take 0.5 ms per prompt token. Requests have 400 prompt tokens, one output token and a deadline of 8
s. Goodput is the number of requests per second that end within their deadline.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench import aims, tenant_mesh
from bench.processes import Fleet, prepare_kill
from bench.results import ScenarioResults, quantile
from bench.tenant_mesh import TOKEN_S, Answered, Arrival, TenantMesh, poisson
from bench.windows import Pace

PREFILLS = 2
TOKENS = 400
DEADLINE_S = 8.0
SECONDS, QUICK_SECONDS = 40.0, 24.0
SETTLE_S = 6.0
"""First seconds of a load, which are not counted: the queue fills."""

CAPACITY = 0.95 * PREFILLS / (TOKENS * TOKEN_S)
"""Requests per second, on the assumption that an engine is idle for a twentieth of its time, between two prompts."""

TENANTS = ("a", "b", "c")
RETRYABLE = frozenset(("QUEUE_FULL", "QUEUE_TIMEOUT", "SHED", "LIVE_REQUESTS_FULL"))
"""Reasons of refusals for lack of capacity, each with RetryInfo."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    seconds = QUICK_SECONDS if pace.is_quick else SECONDS
    with Fleet() as fleet:
        mesh = tenant_mesh.start(fleet, TENANTS, prefills=PREFILLS, router={"queue_delay_max_s": 4.0})
        mesh.learn()
        once = _offer(results, mesh, "1x", CAPACITY, seconds)
        thrice = _offer(results, mesh, "3x", 3 * CAPACITY, seconds)
        results.add("3x", "goodput / that at 1x", "x", thrice / max(once, 1e-9))
        before = _counters(mesh)
        halve = prepare_kill(*mesh.prefills[: PREFILLS // 2])
        _offer(results, mesh, aims.HALVED, CAPACITY, seconds, halve)
        after = _counters(mesh)
        asked = after["asked"] - before["asked"]
        again = after["again"] - before["again"]
        results.add(aims.HALVED, aims.ATTEMPTS, "x", (asked + again) / max(1.0, asked))


def _offer(
    results: ScenarioResults,
    mesh: TenantMesh,
    case: str,
    per_s: float,
    seconds: float,
    disturb: Callable[[], None] | None = None,
) -> float:
    """Offer `per_s` requests a second for `seconds`, call `disturb` after a third of that time, and return the goodput."""
    draw = random.Random(len(case))
    arrivals = [
        one
        for tenant in TENANTS
        for one in poisson(draw, tenant, per_s / len(TENANTS), TOKENS, seconds, deadline_s=DEADLINE_S)
    ]
    arrivals.sort(key=lambda one: one.at_s)
    seen = _replay(mesh, arrivals, seconds / 3, disturb)
    good = [one for one in seen if not one.reason and SETTLE_S <= one.ended_s <= seconds]
    goodput = len(good) / (seconds - SETTLE_S)
    results.add(case, "goodput", "requests/s", goodput)
    results.add(case, "time to first token, p95", "ms", quantile([one.ttft_ms or 0.0 for one in good], 0.95))
    refused = [one for one in seen if one.reason]
    results.add(case, "refused", "%", 100 * len(refused) / len(seen))
    untold = Counter(one.reason for one in refused if one.reason in RETRYABLE and one.retry_after_s is None)
    if untold:
        results.problem(f"refused without RetryInfo: {dict(untold)}", case)
    reasons = Counter(one.reason for one in refused)
    others = {reason: count for reason, count in reasons.items() if reason not in RETRYABLE}
    retryable = 100 * sum(one.reason in RETRYABLE for one in refused) / max(1, len(refused))
    results.add(case, "refused for lack of capacity, with RetryInfo", "%", retryable)
    if others:
        results.problem(f"of {len(seen)} requests {others} ended otherwise", case)
    return goodput


def _replay(
    mesh: TenantMesh, arrivals: Sequence[Arrival], after_s: float, disturb: Callable[[], None] | None
) -> list[Answered]:
    if disturb is None:
        return mesh.replay(arrivals)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(mesh.replay, arrivals)
        time.sleep(after_s)
        disturb()
        return seen.result()


def _counters(mesh: TenantMesh) -> dict[str, float]:
    """Return totals of the frontend: `asked`, its requests, and `again`, its retries and resumes."""
    metric = mesh.frontend.metric
    return {
        "asked": metric("kvmesh_frontend_request_seconds_count"),
        "again": metric("kvmesh_frontend_retries_total") + metric("kvmesh_frontend_resumes_total"),
    }
