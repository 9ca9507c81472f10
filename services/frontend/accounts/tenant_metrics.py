"""Metrics by tenant, with bounded cardinality: few series, fixed at start, whatever the number of tenants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvmesh.errors import MeshError
from kvmesh.metrics import Counter, Metrics
from kvmesh.tenants.caller import Caller
from kvmesh.tenants.labels import ANONYMOUS, NAMES_MAX, OTHER, Labels
from services.frontend.requests.request import LiveRequest

QUOTA: Final = ("REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED")
"""Refusals by the tenant's own limits; all others count as REFUSED."""

REFUSED: Final = "REFUSED"
OK: Final = "OK"
FAILED: Final = "FAILED"


@dataclass(frozen=True, slots=True)
class _Series:
    outcomes: dict[str, Counter]
    prompt: Counter
    cached: Counter
    output: Counter
    live_s: Counter


class TenantMetrics:
    """Counters of the tenants with a label of their own, and of all others together."""

    def __init__(self, metrics: Metrics, tenants: Iterable[str]) -> None:
        """`tenants`: in the order of the configuration."""
        names = list(tenants)
        self._labels = Labels(names)
        shown = [ANONYMOUS, *names[:NAMES_MAX], OTHER] if names else [ANONYMOUS]
        self._series = {name: _series(metrics, name) for name in shown}

    def on_end(self, request: LiveRequest) -> None:
        """Count a request that has ended for its client."""
        assert request.outcome is not None
        series = self._of(request.spec.caller)
        series.outcomes[OK if request.outcome.error is None else FAILED].value += 1
        progress, spec = request.progress, request.spec
        series.prompt.value += spec.prompt_tokens
        series.cached.value += progress.cached_tokens or 0
        series.output.value += len(progress.ids) - len(spec.execution.received_ids)
        series.live_s.value += request.ended_s - spec.timing.arrived_s

    def on_refused(self, error: MeshError, caller: Caller | None) -> None:
        """Count a request that was refused before its admission; without a caller it counts for no tenant."""
        if caller is not None:
            reason = error.reason if error.reason in QUOTA else REFUSED
            self._of(caller).outcomes[reason].value += 1

    def _of(self, caller: Caller) -> _Series:
        return self._series.get(self._labels.of(caller.tenant.name)) or self._series[ANONYMOUS]


def _series(metrics: Metrics, name: str) -> _Series:
    def requests(outcome: str) -> Counter:
        return metrics.counter(
            "tenant_requests", "Ended requests of a tenant, by outcome.", tenant=name, outcome=outcome
        )

    def tokens(kind: str) -> Counter:
        return metrics.counter(
            "tenant_tokens", "Tokens of a tenant's requests, by kind.", tenant=name, kind=kind
        )

    return _Series(
        {outcome: requests(outcome) for outcome in (OK, FAILED, REFUSED, *QUOTA)},
        tokens("prompt"),
        tokens("cached"),
        tokens("output"),
        metrics.counter(
            "tenant_live_seconds", "Time of a tenant's requests from arrival to end.", tenant=name
        ),
    )
