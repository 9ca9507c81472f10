"""What a frontend counts of its budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.metrics import Counter, Metrics
from services.frontend.accounts.budgets.refusals import REASONS

REFUSALS: Final = tuple(dict.fromkeys([*REASONS.values(), "BUDGET_UNAVAILABLE"]))


class BudgetMetrics:
    """Counters of one process. `label_of(tenant)` returns one of few names."""

    def __init__(self, metrics: Metrics, label_of: Callable[[str], str]) -> None:
        about = "Requests admitted by a budget, by who held it: a slab here, Redis, or a local bucket while Redis was away."
        self.quota_lease = metrics.counter("reservations", about, holder="quota_lease")
        self.redis = metrics.counter("reservations", about, holder="redis")
        self.local = metrics.counter("reservations", about, holder="local")
        self.refusals = {
            reason: metrics.counter("budget_refusals", "Requests that a budget refused.", reason=reason)
            for reason in REFUSALS
        }
        self.known_refusals = metrics.counter(
            "budget_refusals_known", "Of these, refused without asking Redis: it had just denied the same."
        )
        self.overrun_refusals = metrics.counter(
            "budget_refusals_overrun",
            "Of these, refused because running requests may use too much beyond their reservations (tokens_overrun).",
        )
        self.overruns = metrics.counter(
            "overruns", "Requests that were charged more than was reserved at first."
        )
        self.overrun_tokens = metrics.counter(
            "overrun_tokens", "Tokens charged beyond what was reserved at first."
        )
        self.extensions = metrics.counter("budget_extensions", "Times a long stream reserved more.")
        self.abandoned = metrics.counter("reservations_abandoned", "Given back at once: the caller had left.")
        self.dropped = metrics.counter("budget_settlements_dropped", "Settlements that Redis never took.")
        self._metrics = metrics
        self._label_of = label_of
        self._charged: dict[str, Counter] = {}

    def charge(self, tenant: str, tokens: int) -> None:
        """Count what a tenant was charged."""
        label = self._label_of(tenant)
        counter = self._charged.get(label)
        if counter is None:
            counter = self._charged[label] = self._metrics.counter(
                "charged_tokens", "Tokens charged to budgets, by tenant.", tenant=label
            )
        counter.value += tokens
