"""Refusals as a client takes them: waited for within its patience, told apart, and what they tell is kept."""

from __future__ import annotations

import grpc
import pytest

from kvmesh.client import MeshFull, QuotaExceeded, RetryPolicy
from kvmesh.client.call_state import CallState
from kvmesh.client.connections import RemainingQuota, remaining_of
from kvmesh.client.errors import error_of
from kvmesh.client.retries import GiveUp, Retry
from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb

QUOTA = {"tenant:search": "the limit of 60 requests per minute is reached"}


def refused(reason: str, retry_after_s: float | None, code: str = "RESOURCE_EXHAUSTED") -> ErrorDetails:
    return ErrorDetails(grpc.StatusCode[code], "why", reason, {}, retry_after_s, {}, QUOTA)


def call_state(**retry_policy: float) -> CallState:
    made = CallState(pb.GenerateRequest(text="x"), RetryPolicy(**retry_policy), 100.0, has_own_key=True)  # type: ignore[arg-type]
    made.outgoing()
    return made


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.99])
def test_a_refusal_is_waited_for_as_long_as_it_says_and_a_little_longer(jitter: float) -> None:
    """Never shorter, and clients that were refused together come back apart."""
    step = call_state().on_error(refused("TOKEN_RATE_EXCEEDED", 2.0), has_other=True, now_s=0, jitter=jitter)
    assert isinstance(step, Retry) and 2.0 <= step.after_s <= 2.5 and (step.after_s > 2.0) == (jitter > 0)


@pytest.mark.parametrize(
    ("retry_policy", "retry_after_s", "code"),
    [
        ({"retry_after_max_s": 1.5}, 2.0, "RESOURCE_EXHAUSTED"),
        ({"retry_after_max_s": 0.0}, 0.01, "RESOURCE_EXHAUSTED"),
        ({"retry_after_max_s": 0.0}, None, "RESOURCE_EXHAUSTED"),
        ({}, 31.0, "RESOURCE_EXHAUSTED"),
        ({}, 31.0, "UNAVAILABLE"),
    ],
)
def test_patience_ends_where_the_caller_says(
    retry_policy: dict[str, float], retry_after_s: float | None, code: str
) -> None:
    """Too long a wait is told at once, and a caller may want no wait at all."""
    reason = "BUDGET_UNAVAILABLE" if code == "UNAVAILABLE" else "REQUEST_RATE_EXCEEDED"
    step = call_state(**retry_policy).on_error(
        refused(reason, retry_after_s, code), has_other=True, now_s=0, jitter=0.5
    )
    assert isinstance(step, GiveUp) and step.error.retry_after_s == retry_after_s


def test_a_quota_is_told_apart_from_a_full_mesh() -> None:
    """Who catches MeshFull catches both; who wants to know whose limit it was finds it."""
    error = error_of(refused("CONCURRENCY_EXCEEDED", None))
    assert isinstance(error, QuotaExceeded) and isinstance(error, MeshFull) and error.quota == QUOTA
    assert not isinstance(error_of(refused("QUEUE_FULL", 1.0)), QuotaExceeded)


def test_what_is_left_is_read_from_the_trailers() -> None:
    """What is not limited is not told; nonsense of another server is nothing."""
    trailers = [("kvmesh-remaining-tokens", "17"), ("kvmesh-remaining-concurrency", "3"), ("other", "5")]
    assert remaining_of(trailers) == RemainingQuota(None, 17, 3)
    assert remaining_of([("kvmesh-remaining-tokens", "many"), ("x", b"\xff")]) is None
