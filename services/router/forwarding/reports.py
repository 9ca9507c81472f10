"""Reports of replicas about an attempt: limited to possible values, and counted for or against the replica. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.blocks import count_for
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.replicas import Replica
from services.router.placement.policy import Hit

OWN_FAULTS: Final = (
    pb.Failure.CODE_ENGINE_LOST,
    pb.Failure.CODE_ENGINE_ERROR,
    pb.Failure.CODE_STALLED,
)
"""Failures caused by the replica itself."""

VERDICTS: Final = (pb.Failure.CODE_INVALID, pb.Failure.CODE_INVALID_TOKEN)
"""Failures caused by the request, as one replica sees it. They count once a second replica contradicts them."""

TOGETHER_S: Final = 0.02
"""First tokens of one decode replica within this time may be of one step of its engine."""


def clamp(first: pb.FirstToken, attempt: Attempt, now_s: float) -> None:
    """Limit a report to possible values: cost estimates learn from it, and later messages have narrower fields."""
    cached = min(first.cached_token_count, attempt.submitted.token_count)
    computed = min(first.computed_token_count, attempt.submitted.token_count - cached)
    prefill_us = min(first.prefill_us, max(0, round((now_s - attempt.routing.released_s) * 1e6)))
    claimed = (first.cached_token_count, first.computed_token_count, first.prefill_us)
    if claimed != (cached, computed, prefill_us):
        first.cached_token_count, first.computed_token_count = cached, computed
        first.prefill_us = prefill_us


def hit_of(first: pb.FirstToken, replica: Replica[Attempt], block_tokens: int, now_s: float) -> Hit:
    """Return the measured hit of a prompt that `replica` computed."""
    prefill_s, local_s = first.prefill_us / 1e6, 0.0
    if replica.role == "decode":
        prefill_s, local_s = 0.0, _local_s(prefill_s, replica, now_s)
    return Hit(
        cached_tokens=first.cached_token_count,
        computed_tokens=first.computed_token_count,
        cached_blocks=count_for(first.cached_token_count, block_tokens),
        prefill_s=prefill_s,
        local_s=local_s,
    )


def _local_s(seconds: float, decode: Replica[Attempt], now_s: float) -> float:
    """Return how many of the `seconds` `decode` can have spent on the prompt: at most those since its previous one.

    0: unknown. Prompts of one engine step are reported one after another, and each took as long as the step.
    """
    gap_s, decode.computed_s = now_s - decode.computed_s, now_s
    if gap_s >= seconds:
        return seconds
    return gap_s if gap_s > TOGETHER_S else 0.0


def blame(attempt: Attempt, replica: Replica[Attempt], failure: pb.Failure, now_s: float) -> None:
    """Count a failure against the replica that caused it."""
    if failure.untouched and not (attempt.is_local and attempt.outcome.was_taken):
        return  # the replica was full, or gave the attempt back before its start
    name, prefill = name_of(pb.Failure.Code, failure.code), attempt.prefill.replica
    if failure.code in OWN_FAULTS:
        replica.failed(attempt.routing.released_s, now_s, name)
    elif failure.code == pb.Failure.CODE_HANDOFF_LOST and replica is attempt.decode.replica and prefill:
        # The prefill that did not deliver is blamed. Decode is blamed too if it also lost handoffs of another prefill,
        # or if this prefill has delivered a handoff since the first one that decode lost.
        prefill.failed(attempt.routing.released_s, now_s, name)
        since_s = replica.handoffs.lost.setdefault(prefill.name, now_s)
        if len(replica.handoffs.lost) > 1 or prefill.handoffs.last_given_s > since_s:
            replica.failed(attempt.routing.released_s, now_s, name)


def handed_over(attempt: Attempt, decode: Replica[Attempt], now_s: float) -> None:
    """Count a KV transfer as success of prefill, and as a good start of `decode`."""
    decode.answered_well(attempt.routing.released_s)
    decode.handoffs.lost.clear()
    if attempt.prefill.replica is not None:
        attempt.prefill.replica.ended_well(attempt.routing.released_s)
        attempt.prefill.replica.handoffs.last_given_s = now_s


def failed_at(attempt: Attempt, code: pb.Failure.Code.ValueType, replica: str) -> tuple[str, ...]:
    """Return the replicas that the request's next attempt avoids, after `replica` failed this one."""
    placement = attempt.routing.placement
    if code == pb.Failure.CODE_HANDOFF_LOST and placement is not None:
        return (placement.prefill or replica, placement.decode)
    if code in OWN_FAULTS or code in VERDICTS or code in (pb.Failure.CODE_GAP, pb.Failure.CODE_REPLICA_LOST):
        return (replica,)
    return ()
