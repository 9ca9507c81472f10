"""Regions in which one request is not sent any more, after refusals that concern a whole region. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Final

from kvmesh.errors import ErrorDetails

REGION_UNAVAILABLE: Final = "REGION_UNAVAILABLE"
"""Reason of a region that cannot serve the request."""

ALLOWED_KEY: Final = "regions"
"""Key in the metadata of REGION_UNAVAILABLE: the tenant's regions, with commas. Absent: the tenant is not pinned."""

UNKNOWN_THERE: Final = frozenset({"RESUME_TOKEN_INVALID", "STALE_SNAPSHOT"})
"""Reasons of a region that lacks the secret of a resume token, or the model version of a stream."""


WAITS_MAX: Final = 2
"""Refusals of a pinned tenant while its regions are lost. The last one is final."""


class RegionStep(enum.Enum):
    """Consequence of a status for the region of the next send."""

    STAY = enum.auto()
    """The status does not concern the region, or no other region is left to ask."""
    MOVE = enum.auto()
    """The next send goes to another region."""
    FINAL = enum.auto()
    """No region that may serve the pinned tenant serves the request now."""


class RegionFilter:
    """Regions that are closed to one request. `names`: the regions of the client.

    INVARIANT: `barred` leaves at least one region.
    """

    def __init__(self, names: Iterable[str] = ("",)) -> None:
        self.barred: frozenset[str] = frozenset()
        self._names = frozenset(names)
        self._allowed = self._names
        """Regions that may serve the tenant, as far as refusals have named them."""
        self._waits = 0
        """Refusals of a pinned tenant while all its regions were lost."""
        self._refused: frozenset[str] = frozenset()
        """Regions that have refused the request since its last `started`."""

    def on_started(self) -> None:
        """A region serves the request, with a new resume token: earlier refusals count no more."""
        self._refused = frozenset()
        self.barred = self._names - self._allowed

    def on_status(
        self, region: str, details: ErrorDetails, works: Callable[[str], bool], *, has_tokens: bool = False
    ) -> RegionStep:
        """A frontend of `region` ended the call with `details`. `works`: True for a region with a frontend to try."""
        if details.reason == REGION_UNAVAILABLE:
            return self._on_unavailable(region, details, works, has_tokens=has_tokens)
        if details.reason in UNKNOWN_THERE:
            return self._on_unknown(region, works)
        return RegionStep.STAY

    def _on_unavailable(
        self, region: str, details: ErrorDetails, works: Callable[[str], bool], *, has_tokens: bool
    ) -> RegionStep:
        """While all regions that are left are lost, the request stays here and is sent again after its Retry-After.

        The second refusal of a pinned tenant is final then. A stream with tokens waits for one of its regions, also for
        the one that refused it.
        """
        pinned_to = details.metadata.get(ALLOWED_KEY)
        if pinned_to is not None:
            self._allowed &= frozenset(pinned_to.split(","))
        left = self._allowed - self._refused - {region}
        is_lost = bool(left) and not any(map(works, left))
        if is_lost and pinned_to is None:
            return RegionStep.STAY
        if is_lost and not has_tokens:
            self._waits += 1
            return RegionStep.STAY if self._waits < WAITS_MAX else RegionStep.FINAL
        self._refused |= {region}
        if self._bar_refused():
            return RegionStep.MOVE
        # A region that may serve the tenant, or the one of a client that names none, has lost its routers for a while.
        may_serve = region in self._allowed or not region
        return RegionStep.STAY if pinned_to is None or (has_tokens and may_serve) else RegionStep.FINAL

    def _on_unknown(self, region: str, works: Callable[[str], bool]) -> RegionStep:
        if not any(works(name) for name in self._allowed - self._refused - {region}):
            return RegionStep.STAY
        self._refused |= {region}
        self._bar_refused()
        return RegionStep.MOVE

    def _bar_refused(self) -> bool:
        """Bar the regions that refused the request; return False if none is left. Then each may be asked again."""
        is_left = bool(self._allowed - self._refused)
        if not is_left:
            self._refused = frozenset()
        if self._allowed:
            self.barred = (self._names - self._allowed) | self._refused
        return is_left
