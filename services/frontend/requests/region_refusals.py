"""Refusals of other regions for lack of capacity: where no further session is spilled, and which region failover asks last.

Pure. Each refusal of a spilled request is a second attempt for one request. So a region gets new spill only while its
refusals are at most REFUSED_SHARE of all requests of this frontend: spill falls with what the region refuses, and one bad
request stops nobody else's. A region that refuses for the grant rests, too, for a round of grants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REST_S: Final = 0.25
"""Time without new spill to a region after it refused a request for its grant: about a round of grants."""

REFUSED_SHARE: Final = 0.1
"""Refusals of one region by all new requests, beyond which no further session is spilled there (retry amplification)."""

REFUSED_BURST: Final = 5.0
"""Refusals that are free after a quiet time."""

LAST_S: Final = 1.0
"""Time for which a region that refused a request is the last one that failover asks."""


@dataclass(slots=True)
class _Region:
    level: float
    """Refusals that are left, at least -REFUSED_BURST."""
    seen: int
    """Number of requests at the last update."""
    rests_until_s: float = float("-inf")
    last_until_s: float = float("-inf")


class RegionRefusals:
    """See the module. Bound: one record for each region that refused a request."""

    def __init__(self) -> None:
        self._requests = 0
        self._regions: dict[str, _Region] = {}

    def on_request(self) -> None:
        """Count a new request of a client."""
        self._requests += 1

    def on_refusal(self, region: str, now_s: float, *, is_grant: bool) -> None:
        """Take a refusal. `is_grant`: for the grant of the caller's region."""
        found = self._regions.setdefault(region, _Region(REFUSED_BURST, self._requests))
        found.last_until_s = now_s + LAST_S
        found.level = max(-REFUSED_BURST, self._level(found) - 1)
        if is_grant:
            found.rests_until_s = now_s + REST_S

    def is_resting(self, region: str, now_s: float) -> bool:
        """True if `region` refused a request for the grant a moment ago: it gets no spill at all."""
        found = self._regions.get(region)
        return found is not None and now_s < found.rests_until_s

    def is_full(self, region: str) -> bool:
        """True if `region` refuses too many: it gets no new session. Those that are there go on."""
        found = self._regions.get(region)
        return found is not None and self._level(found) < 1

    def is_last(self, region: str, now_s: float) -> bool:
        """True if `region` refused a request lately: failover asks all others before it."""
        found = self._regions.get(region)
        return found is not None and now_s < found.last_until_s

    def _level(self, found: _Region) -> float:
        new, found.seen = self._requests - found.seen, self._requests
        found.level = min(REFUSED_BURST, found.level + new * REFUSED_SHARE)
        return found.level
