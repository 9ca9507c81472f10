"""More work than the replicas can take, on a virtual clock with real cores."""

from __future__ import annotations

import random
from collections import Counter

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.admission import ForwardingLimits
from tests.simulation.pool import BASE_S, TOKEN_S, Pool, RequestResult, merged, poisson

TOKENS = 400
PREFILLS = 2
CAPACITY = PREFILLS / (BASE_S + TOKEN_S * TOKENS)
"""Requests per second."""

SECONDS = 40.0
DEADLINE_S = 6.0
LIMITS = ForwardingLimits(queue_max_requests=200, queue_delay_max_s=3.0)


def good(results: list[RequestResult]) -> int:
    """Return the number of first tokens within the deadline."""
    return sum(one.ttft_s is not None and one.ttft_s <= DEADLINE_S for one in results)


def offer(load: float, seed: int = 1) -> tuple[list[RequestResult], Pool]:
    """Offer `load` times the capacity of the replicas, from three tenants."""
    pool = Pool(seed, prefills=PREFILLS, limits=LIMITS)
    draw, start_s = random.Random(seed), pool.now_s
    each = load * CAPACITY / 3
    terms = {"remaining_ms": round(DEADLINE_S * 1000)}
    arrivals = [
        poisson(draw, tenant, each, TOKENS, start_s, start_s + SECONDS, **terms) for tenant in ("a", "b", "c")
    ]
    return pool.run(merged(*arrivals)), pool


def test_three_times_the_load_costs_no_goodput_and_every_refusal_has_a_retry_after() -> None:
    """Overload turns into typed refusals at once (load shedding); admitted requests are served in time."""
    once, _ = offer(1.0)
    thrice, pool = offer(3.0)
    assert good(thrice) >= 0.95 * good(once), (good(thrice), good(once))
    refused = [one for one in thrice if one.refusal is not None]
    assert len(refused) > len(thrice) / 2
    for one in refused:
        assert one.refusal is not None
        assert one.refusal.reason in (pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_DEADLINE), one.refusal
        assert one.refusal.retry_after_ms > 0, one.refusal
        assert one.refused_s - one.arrival.at_s <= LIMITS.queue_delay_max_s + 1.0
    at_door = sum(one.refused_s == one.arrival.at_s for one in refused)
    assert at_door >= 0.9 * len(refused), "refused at the door, not after a wait"
    late = sum(one.is_late for one in thrice)
    assert late <= 0.02 * len(thrice), "work on requests that are too late"
    pool.router_core.assert_consistent()


def test_under_overload_tenants_are_refused_by_what_they_offer() -> None:
    """A tenant within its share loses next to nothing while another offers five times the capacity."""
    pool = Pool(2, prefills=PREFILLS, limits=LIMITS)
    draw, start_s = random.Random(2), pool.now_s
    terms = {"remaining_ms": round(DEADLINE_S * 1000)}
    results = pool.run(
        merged(
            poisson(draw, "greedy", 5 * CAPACITY, TOKENS, start_s, start_s + 20.0, **terms),
            poisson(draw, "modest", 0.2 * CAPACITY, TOKENS, start_s, start_s + 20.0, **terms),
        )
    )
    ends = Counter((one.arrival.tenant, one.refusal is None) for one in results)
    assert ends["modest", False] <= 0.05 * ends["modest", True], ends
    assert ends["greedy", False] > ends["greedy", True]


def test_sheddable_work_is_evicted_first() -> None:
    """In a full queue sheddable requests are evicted for others, with the reason."""
    limits = ForwardingLimits(queue_max_requests=20, queue_delay_max_s=600.0)
    pool = Pool(3, prefills=1, limits=limits)
    draw, start_s = random.Random(3), pool.now_s
    rate = 2 * CAPACITY / PREFILLS
    results = pool.run(
        merged(
            poisson(draw, "batch", rate, TOKENS, start_s, start_s + 30.0, sheddable=True, band=2),
            poisson(draw, "chat", rate, TOKENS, start_s, start_s + 30.0, band=4),
        )
    )
    evicted = [one for one in results if one.refusal is not None and one.refusal.evicted]
    assert evicted and {one.arrival.tenant for one in evicted} == {"batch"}
    served = Counter(
        one.arrival.tenant for one in results if one.first_s is not None and one.first_s < start_s + 30.0
    )
    assert served["chat"] >= 0.95 * 30.0 * CAPACITY / PREFILLS - 20
