"""The Placement row for the frontend, and times in the units and ranges of the wire. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt
from services.router.placement.explanation import why
from services.router.placement.policy import Placement

MS_MAX: Final = (1 << 32) - 1

US_MAX: Final = 1 << 53
"""Upper bound of reported times on the wire (285 years). It fits every field on the way."""


def placement_row(
    attempt: Attempt, placement: Placement, now_s: float, decode_running: int = 0
) -> pb.Placement:
    """Return `placement` as the frontend gets it. `decode_running`: requests that run at the decode replica."""
    row = pb.Placement(
        slot=attempt.slot,
        prefill_replica=placement.prefill or "",
        decode_replica=placement.decode,
        matched_block_count=placement.matched_blocks,
        prompt_block_count=len(attempt.hashes),
        queue_us=as_us(now_s - attempt.submitted.arrived_s),
        estimate_us=as_us(placement.estimate_s),
        decode_running_count=decode_running,
    )
    if placement.candidates:
        row.reason = why(
            placement, waited_s=now_s - attempt.submitted.arrived_s, waited_for=attempt.routing.waited_for
        )
    for one in placement.candidates:
        told = row.candidates.add(
            replica=one.replica,
            matched_block_count=one.matched_blocks,
            queue_us=as_us(one.queue_s),
            prefill_us=as_us(one.prefill_s),
            score=one.score,
        )
        if placement.prefill is None:
            told.decode_us = as_us(one.decode_s)
    return row


def as_ms(seconds: float) -> int:
    """Return milliseconds, from 0 to MS_MAX."""
    return round(min(max(0.0, seconds * 1e3), MS_MAX))


def as_us(seconds: float) -> int:
    """Return microseconds, from 0 to US_MAX."""
    return round(min(max(0.0, seconds * 1e6), US_MAX))
