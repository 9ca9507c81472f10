"""The retry budget of a client: its bound under random requests, and what it leaves alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import grpc
import pytest

from kvmesh.client.retries import GiveUp, Retries, Retry, RetryContext
from kvmesh.client.retry_budget import SPARE, RetryBudget
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.errors import ErrorDetails

FULL = ErrorDetails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", {}, 0.1, {})
QUOTA = ErrorDetails(grpc.StatusCode.RESOURCE_EXHAUSTED, "your limit", "CONCURRENCY_EXCEEDED", {}, 0.1, {})


def retries(budget: RetryBudget, token_count: int = 0) -> Retries:
    """Return the state of a new request of the client."""
    return Retries(RetryPolicy(), 1000.0, token_count, has_own_key=True, budget=budget)


def context(token_count: int = 0) -> RetryContext:
    """Return the situation at a refusal."""
    return RetryContext(token_count, has_other=False, now_s=1.0, jitter=0.0)


@pytest.mark.parametrize("seed", range(50))
def test_a_full_mesh_gets_few_retries(seed: int) -> None:
    """Whatever is refused, n requests make at most SPARE + n x share retries; a mesh that has room again gets them back."""
    draw, share = random.Random(seed), 0.05
    budget, retried = RetryBudget(share), 0
    for number in range(1, 400):
        budget.on_request()
        one = retries(budget)
        while draw.random() < 0.9:
            if isinstance(one.on_error(FULL, context()), GiveUp):
                break
            retried += 1
        assert retried <= SPARE + number * share
    assert retried > SPARE + 10


def test_a_client_with_few_requests_retries_as_its_policy_says() -> None:
    """The budget begins full."""
    one = retries(RetryBudget(0.0))
    steps = [one.on_error(FULL, context()) for _ in range(RetryPolicy().refusals_max)]
    assert [isinstance(each, Retry) for each in steps] == [True, True, True, False]


def test_an_empty_budget_hands_the_refusal_to_the_caller() -> None:
    """With its Retry-After. The caller's own quota, lost frontends and streams with tokens need no budget."""
    empty = RetryBudget(0.0)
    while empty.take(1.0):
        pass
    step = retries(empty).on_error(FULL, context())
    assert isinstance(step, GiveUp) and step.error.retry_after_s == 0.1
    assert isinstance(retries(empty).on_error(QUOTA, context()), Retry)
    assert isinstance(retries(empty).on_lost("gone", context()), Retry)
    assert isinstance(retries(empty, 3).on_error(FULL, context(3)), Retry)
    one_full = replace(FULL, reason="LIVE_REQUESTS_FULL")
    assert isinstance(retries(empty).on_error(one_full, context()), Retry)


def test_a_refusal_that_is_not_retried_takes_nothing() -> None:
    """The Retry-After ends behind the deadline: the next request finds its retries."""
    budget = RetryBudget(0.0)
    for _ in range(3 * round(SPARE)):
        one = Retries(RetryPolicy(), 1.05, 0, has_own_key=True, budget=budget)
        assert isinstance(one.on_error(FULL, context()), GiveUp)
    assert isinstance(retries(budget).on_error(FULL, context()), Retry)


def test_the_budget_grows_with_requests_and_time_and_may_be_unbounded() -> None:
    """Twenty requests of a twentieth add one retry, and so does a minute; an infinite share bounds nothing."""
    budget = RetryBudget(0.05)
    while budget.take(0.0):
        pass
    for _ in range(20):
        budget.on_request()
    assert budget.take(0.0) and not budget.take(0.0)
    assert budget.take(60.0) and not budget.take(60.0)
    free = RetryBudget(math.inf)
    assert all(free.take(0.0) for _ in range(1000))
    large = RetryBudget(3.0)
    assert sum(large.take(0.0) for _ in range(1000)) == 300
