"""Refusals at the client: Retry-After within the retry policy, quota errors, and the remaining quota."""

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
def test_a_retry_waits_for_the_retry_after_and_jitter(jitter: float) -> None:
    """The wait is never shorter, and jitter spreads clients that were refused together."""
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
def test_the_retry_policy_bounds_the_retry_after(
    retry_policy: dict[str, float], retry_after_s: float | None, code: str
) -> None:
    """A longer Retry-After fails at once, and a caller may allow no wait at all."""
    reason = "BUDGET_UNAVAILABLE" if code == "UNAVAILABLE" else "REQUEST_RATE_EXCEEDED"
    step = call_state(**retry_policy).on_error(
        refused(reason, retry_after_s, code), has_other=True, now_s=0, jitter=0.5
    )
    assert isinstance(step, GiveUp) and step.error.retry_after_s == retry_after_s


def test_a_quota_error_differs_from_a_full_mesh() -> None:
    """A handler of MeshFull catches both; the quota error names the scope of the limit."""
    error = error_of(refused("CONCURRENCY_EXCEEDED", None))
    assert isinstance(error, QuotaExceeded) and isinstance(error, MeshFull) and error.quota == QUOTA
    assert not isinstance(error_of(refused("QUEUE_FULL", 1.0)), QuotaExceeded)


def test_the_remaining_quota_is_read_from_the_trailers() -> None:
    """A scope without a limit has no trailer; unreadable trailers of another server are ignored."""
    trailers = [("kvmesh-remaining-tokens", "17"), ("kvmesh-remaining-concurrency", "3"), ("other", "5")]
    assert remaining_of(trailers) == RemainingQuota(None, 17, 3)
    assert remaining_of([("kvmesh-remaining-tokens", "many"), ("x", b"\xff")]) is None
