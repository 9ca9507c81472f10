"""Whether a router can place new requests, as it tells the frontends. Pure.

A frontend sends a request to another pool if no router of its pool can place. The answer is computed again only when the
eligible replicas have changed, or when a load report is due.
"""

from __future__ import annotations

from services.router.forwarding.eligible_replicas import EligibleReplicas


class Readiness:
    """The state of one router. The owner sets the fields, then calls `check`."""

    __slots__ = ("_eligible", "_seen_changes", "can_place", "is_closed", "is_cordoned", "needs_prefill")

    def __init__(self, eligible: EligibleReplicas) -> None:
        self.is_closed = False
        """True while the control plane closes the pool."""
        self.is_cordoned = False
        """True while the control plane keeps this router out of use."""
        self.needs_prefill = True
        """False: the pool is configured without prefill replicas, and decode runs the prompts."""
        self.can_place = False
        """The answer of the last check."""
        self._eligible = eligible
        self._seen_changes = -1

    def may_have_changed(self) -> bool:
        """Return True if the eligible replicas have changed since the last check. Costs one comparison."""
        return self._eligible.change_count != self._seen_changes

    def check(self, now_s: float, *, is_draining: bool) -> bool:
        """Compute `can_place`. Return True if it changed."""
        before = self.can_place
        self._seen_changes = self._eligible.change_count
        is_open = not (self.is_closed or self.is_cordoned or is_draining)
        self.can_place = is_open and self._eligible.can_place(now_s, needs_prefill=self.needs_prefill)
        return self.can_place is not before
