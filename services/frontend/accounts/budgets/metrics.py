"""Metrics of budgets at a frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.metrics import Counter, Metrics
from services.frontend.accounts.budgets.refusals import REASONS

REFUSALS: Final = tuple(dict.fromkeys([*REASONS.values(), "BUDGET_UNAVAILABLE"]))


class BudgetMetrics:
    """Counters of one process. `label_of(tenant)` bounds the cardinality: it returns one of few names."""

    def __init__(self, metrics: Metrics, label_of: Callable[[str], str]) -> None:
        about = (
            "Requests admitted by a budget, by holder: a quota lease, Redis, or a local bucket in an outage."
        )
        self.quota_lease = metrics.counter("reservations", about, holder="quota_lease")
        self.redis = metrics.counter("reservations", about, holder="redis")
        self.local = metrics.counter("reservations", about, holder="local")
        self.refusals = {
            reason: metrics.counter(
                "budget_refusals", "Requests refused by a budget, by reason.", reason=reason
            )
            for reason in REFUSALS
        }
        self.known_refusals = metrics.counter(
            "budget_refusals_known", "Refusals from the cache of denials, without a question to Redis."
        )
        self.overrun_refusals = metrics.counter(
            "budget_refusals_overrun",
            "Refusals because the open overrun of running requests would exceed tokens_overrun.",
        )
        self.overruns = metrics.counter("overruns", "Requests charged more than their first reservation.")
        self.overrun_tokens = metrics.counter("overrun_tokens", "Tokens charged beyond first reservations.")
        self.extensions = metrics.counter("budget_extensions", "Extensions of reservations by long streams.")
        self.abandoned = metrics.counter(
            "reservations_abandoned", "Reservations given back at once because the caller was cancelled."
        )
        self.dropped = metrics.counter(
            "budget_settlements_dropped", "Settlements dropped because Redis never took them."
        )
        self._metrics = metrics
        self._label_of = label_of
        self._charged: dict[str, Counter] = {}

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens charged to a tenant."""
        label = self._label_of(tenant)
        counter = self._charged.get(label)
        if counter is None:
            counter = self._charged[label] = self._metrics.counter(
                "charged_tokens", "Tokens charged to budgets, by tenant.", tenant=label
            )
        counter.value += tokens
