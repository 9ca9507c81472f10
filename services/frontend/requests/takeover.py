"""Where a request's attempt can be taken over, and how far the search for it has come.

Pure. An adopt that comes late must not take an attempt away from who asked after it: takeovers carry ascending numbers, and
those of a later execution, at whichever frontend, lie above those of every earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as attach

TAKEOVER_RETRY_S: Final = 0.1
"""Wait before a router that is still learning who is there is asked again for a running attempt."""

NUMBERS: Final = 1 << 8
"""Adoption numbers per attempt number of the base."""


@dataclass(frozen=True, slots=True)
class AttemptLocation:
    """Where an attempt generates."""

    attempt: int
    decode_replica: str


class Takeover:
    """What a request remembers of its takeovers."""

    __slots__ = ("base", "fault", "late_takeovers", "total", "until_s")

    def __init__(self, attempt_base: int) -> None:
        self.base = attempt_base
        self.total = 0
        """Adopts that were sent."""
        self.late_takeovers = 0
        """Times the attempt was taken away from its slot by a late adopt."""
        self.fault = ""
        """Why the attempt had to be sought."""
        self.until_s: float | None = None
        """The attempt is sought until then."""

    def next_row(
        self, slot: int, request_id: str, location: AttemptLocation, position: int, window_end: int
    ) -> attach.Adopt:
        """Return the next adopt of the attempt at `location`, from `position` on."""
        self.total += 1
        return attach.Adopt(
            slot=slot,
            request_id=request_id,
            attempt=location.attempt,
            position=position,
            credit_position=window_end,
            decode_replica=location.decode_replica,
            adoption=self.base * NUMBERS + self.total,
        )
