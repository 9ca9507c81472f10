"""What is told about an engine call when it is over: for spans and metrics, never for decisions. Pure."""

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
    """First answer. None: there was none."""
    ended_s: float
    tokens: int
    reused_blocks: int
    outcome: str
    """How it ended: "length", "end_token", "cancelled" or the name of an error."""


Recorder = Callable[[CallRecord], None]


def discard_record(record: CallRecord) -> None:
    """Record nothing."""
