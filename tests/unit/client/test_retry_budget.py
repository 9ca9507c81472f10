"""The retry budget of a client: its bound under random requests, and what it leaves alone."""

from __future__ import annotations

import random

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
    draw, share = random.Random(seed), 0.1
    budget, retried = RetryBudget(share), 0
    for number in range(1, 400):
        budget.on_request()
        one = retries(budget)
        while draw.random() < 0.9:
            if isinstance(one.on_error(FULL, context()), GiveUp):
                break
            retried += 1
        assert retried <= SPARE + number * share
    assert retried > SPARE + 20


def test_a_client_with_few_requests_retries_as_its_policy_says() -> None:
    """The budget begins full."""
    one = retries(RetryBudget(0.0))
    steps = [one.on_error(FULL, context()) for _ in range(RetryPolicy().refusals_max)]
    assert [isinstance(each, Retry) for each in steps] == [True, True, True, False]


def test_an_empty_budget_hands_the_refusal_to_the_caller() -> None:
    """With its Retry-After. The caller's own quota, lost frontends and streams with tokens need no budget."""
    empty = RetryBudget(0.0)
    while empty.take():
        pass
    step = retries(empty).on_error(FULL, context())
    assert isinstance(step, GiveUp) and step.error.retry_after_s == 0.1
    assert isinstance(retries(empty).on_error(QUOTA, context()), Retry)
    assert isinstance(retries(empty).on_lost("gone", context()), Retry)
    assert isinstance(retries(empty, 3).on_error(FULL, context(3)), Retry)
