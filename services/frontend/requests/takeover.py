"""Stream takeover of a request's running attempt: its location, and the state of the search (failover, decision 0004).

Pure. A late adopt must not take an attempt away from a later adopt. Takeovers therefore have ascending numbers (fencing).
The numbers of a later execution, at any frontend, are above those of every earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.regions.names import qualified, split

TAKEOVER_RETRY_S: Final = 0.1
"""Wait before the next adopt of a running attempt if a router is still learning the members of the mesh."""

NUMBERS: Final = 1 << 8
"""The n-th takeover of an execution has the number base x NUMBERS + n, with the execution's attempt base."""


@dataclass(frozen=True, slots=True)
class AttemptLocation:
    """Location of a running attempt: its number and the decode replica that generates it."""

    attempt: int
    decode_replica: str
    """Its name; "region/name" in a resume token of a mesh with regions."""

    @property
    def region(self) -> str:
        """Region of the replica. Empty: the place says none."""
        return split(self.decode_replica)[0]


def located_in(location: AttemptLocation, region: str) -> AttemptLocation:
    """Return `location` with the name of `region`. A location that has one already keeps it."""
    if location.region:
        return location
    return AttemptLocation(location.attempt, qualified(region, location.decode_replica))


class Takeover:
    """State of a request's takeovers."""

    __slots__ = ("base", "fault", "late_takeovers", "total", "until_s")

    def __init__(self, attempt_base: int) -> None:
        self.base = attempt_base
        self.total = 0
        """Number of sent adopts."""
        self.late_takeovers = 0
        """Number of times that a late adopt took the attempt away from its slot."""
        self.fault = ""
        """Fault that made the takeover necessary."""
        self.until_s: float | None = None
        """End of the search for the attempt. None: no search."""

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
