"""The record of an ended engine call, for spans and metrics; no decision reads it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One engine call. Times in seconds on the replica's clock."""

    request_id: str
    attempt: int
    traceparent: str
    is_local: bool
    called_s: float
    answered_s: float | None
    """Time of the first answer. None: no answer came."""
    ended_s: float
    tokens: int
    reused_blocks: int
    outcome: str
    """"length", "end_token", "cancelled" or the name of an error."""
    purpose: str = ""
    """"warm_up" or "probe" for a call of the control plane; empty for every other call."""


Recorder = Callable[[CallRecord], None]


def discard_record(record: CallRecord) -> None:
    """Record nothing."""
