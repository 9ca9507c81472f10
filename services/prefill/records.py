"""The record of an ended engine call, for spans and metrics; no decision reads it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One context_only call, or the call of a seed. Times in seconds on the replica's clock."""

    request_id: str
    attempt: int
    traceparent: str
    submitted_s: float
    called_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    outcome: str
    """"first_token", "end_token" (before any token), "seeded", "cancelled" or the name of an error."""
    purpose: str = ""
    """"warm_up" or "probe" for a call of the control plane; empty for every other call."""


Recorder = Callable[[CallRecord], None]


def discard_record(record: CallRecord) -> None:
    """Record nothing."""
