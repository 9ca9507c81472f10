"""Metrics of a frontend.

One series per outcome, fixed at start (bounded cardinality), so that a scrape shows zeros.
"""

from __future__ import annotations

from collections import Counter as Counter_
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvmesh.errors import TABLE, MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.metrics import Counter, Metrics
from kvmesh.snapshot.content import Track
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.settlement import Charge
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.outcome import outcome_of
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.resume_token import Seal

OTHER: Final = "other"
"""Label of all pools outside the configuration."""


class RequestMetrics:
    """Counts requests as they end, in all, by tenant and by pool. Implements core.Observer.

    `pools`: the configured pools. Requests of any other pool count as OTHER. `regions`: the configured ones, the own one
    first; empty: none.
    """

    def __init__(
        self, metrics: Metrics, tenants: TenantMetrics, pools: Sequence[str] = (), regions: Sequence[str] = ()
    ) -> None:
        self._tenants = tenants
        self._attempts = {
            "" if at == 0 else region: metrics.counter(
                "attempts", "Attempts of requests that ended, by the region that served them.", region=region
            )
            for at, region in enumerate(regions)
        }
        """By region, the own one with an empty name."""
        self.track_of: Callable[[str], Track] = lambda _: Track.IDLE
        """Returns the track of a pool in the snapshot in force."""
        text = "Requests that ended, by pool and by the pool's track at that time."
        self._pools = {
            (pool, track): metrics.counter("pool_requests", text, pool=pool, track=track.name.lower())
            for pool in (*pools, OTHER)
            for track in Track
        }
        reasons = [outcome_of(reason) for reason in pb.FinishReason.values()[1:]]
        self._outcomes: dict[str, Counter] = {
            outcome: metrics.counter("requests", "Requests that ended, by outcome.", outcome=outcome)
            for outcome in (*reasons, *TABLE)
        }
        self._ttft = metrics.histogram("ttft_seconds", "From arrival to the first token.")
        self._duration = metrics.histogram("request_seconds", "From arrival to the end.")
        self._prompt = metrics.counter("prompt_tokens", "Tokens of prompts.")
        self._cached = metrics.counter("cached_tokens", "Tokens of prompts found in cache by first attempts.")
        self._output = metrics.counter("output_tokens", "Tokens generated.")
        self._settled = {
            kind: metrics.counter(
                "settled_tokens", "Tokens that were settled; recomputed ones are not charged.", kind=kind
            )
            for kind in ("prompt", "output", "recomputed")
        }
        self._superseded = metrics.counter(
            "settlements_superseded", "Executions of requests that a later execution settles."
        )
        self._recomputed = metrics.counter("recomputed_tokens", "Tokens computed again after a loss.")
        self._takeovers = metrics.counter(
            "takeovers", "Running attempts that were taken over (stream takeover)."
        )
        self._resumes = metrics.counter("resumes", "Attempts that continued a lost one.")
        self._retries = metrics.counter("retries", "Attempts after one that no engine took.")

    def on_end(self, request: LiveRequest) -> None:
        """Count a request at the end of its client's side."""
        assert request.outcome is not None
        self._tenants.on_end(request)
        progress, spec = request.progress, request.spec
        self._outcomes[request.outcome.name].value += 1
        track = self.track_of(spec.pool)
        (self._pools.get((spec.pool, track)) or self._pools[OTHER, track]).value += 1
        if self._attempts:
            for attempt in request.attempts:
                self._attempts[attempt.region].value += 1
        self._duration.observe(request.ended_s - spec.timing.arrived_s)
        if progress.first_token_s is not None and not spec.execution.received_ids:
            self._ttft.observe(progress.first_token_s - spec.timing.arrived_s)
        self._prompt.value += spec.prompt_tokens
        self._cached.value += progress.cached_tokens or 0
        self._output.value += len(progress.ids) - len(spec.execution.received_ids)
        self._recomputed.value += progress.recomputed_tokens
        self._takeovers.value += request.takeovers
        self._resumes.value += request.retry_state.resumes
        self._retries.value += request.retry_state.retries

    def on_charge(self, charge: Charge) -> None:
        """Count settled tokens."""
        self._settled["prompt"].value += charge.prompt_tokens
        self._settled["output"].value += charge.output_tokens
        self._settled["recomputed"].value += charge.recomputed_tokens
        self._superseded.value += charge.is_superseded

    def on_refused(self, error: MeshError, caller: Caller | None) -> None:
        """Count a request that was refused before its admission."""
        self._outcomes[error.reason].value += 1
        self._tenants.on_refused(error, caller)


def watch_pools(metrics: Metrics, core: FrontendCore, pools: Sequence[str]) -> None:
    """Export the weights in force, and the requests that left a pool that could not place them."""

    def weight(pool: str) -> float:
        found = core.pools.content.pool(pool)
        return 0.0 if found is None else float(found.weight_percent)

    def diverted(pool: str) -> float:
        counts = core.pools.diverted
        return counts[pool] if pool != OTHER else counts.total() - sum(counts[known] for known in pools)

    for pool in pools:
        metrics.gauge(
            "pool_weight_percent", "Share of new sessions of the pool.", partial(weight, pool), pool=pool
        )
    for pool in (*pools, OTHER):
        text = "Requests that left the pool, because it had no router that could place them."
        metrics.total("diverted", text, partial(diverted, pool), pool=pool)
    metrics.total(
        "observations_dropped", "Observations dropped by a bound.", lambda: core.observations.dropped_total
    )


def watch_regions(metrics: Metrics, core: FrontendCore, seal: Seal, others: Sequence[str]) -> None:
    """Export what crosses the border of the region, by other region. `others`: empty in a mesh without regions."""
    regions = core.regions

    def of(count: Counter_[str], region: str) -> Callable[[], float]:
        return partial(count.__getitem__, region)

    for each in others:
        text = "Requests that the shares of spill sent to the region."
        metrics.total("spilled_requests", text, of(regions.spilled, each), region=each)
        text = "Requests that moved to the region, which could take them."
        metrics.total("failed_over_requests", text, of(regions.failed_over, each), region=each)
        text = "Requests that took another model version with the region."
        metrics.total("other_version_requests", text, of(regions.other_version, each), region=each)
        text = "Refusals of the region, for the grant of the caller's region."
        metrics.total("grant_refusals", text, of(regions.grant_refusals, each), region=each)
        text = "Requests of callers with this home region."
        metrics.total("guest_requests", text, of(regions.guests, each), region=each)
    if others:
        metrics.gauge(
            "moved_sessions", "Sessions that spill moved to other regions.", lambda: len(regions.sessions)
        )
        metrics.gauge(
            "known_regions", "Other regions with resume tokens that are accepted.", lambda: seal.known_regions
        )
        metrics.total(
            "unknown_home_requests",
            "Requests with an unknown home region, counted as own ones.",
            lambda: regions.unknown_home_total,
        )


def watch_core(metrics: Metrics, core: FrontendCore) -> None:
    """Export the present state of the core."""
    metrics.gauge("live_requests", "Admitted requests with a waiting client.", lambda: len(core.admitted))
    metrics.gauge(
        "draining_requests",
        "Requests that only clean up; their client's side has ended.",
        lambda: len(core.admitted.leaving),
    )
    metrics.gauge("routers_up", "Routers attached.", lambda: sum(peer.link.is_up for peer in core.peers))
    metrics.gauge("open_slots", "Slots open at routers.", lambda: sum(len(peer.slots) for peer in core.peers))
    metrics.gauge("retry_budget_retries", "Retries that may be spent now.", lambda: core.retries.level)
    metrics.total("budgeted_retries", "Retries paid from the retry budget.", lambda: core.retries.spent_total)
    metrics.total(
        "refused_retries", "Retries that the retry budget refused.", lambda: core.retries.refused_total
    )
    known = core.verdicts
    text = "Verdicts of one replica on a request, by result of the cross-check."
    for outcome, total in (
        ("contested", lambda: known.cross_checks_total),
        ("contradicted", lambda: known.contradicted_total),
        ("confirmed", lambda: known.confirmed_total),
        ("unpaid", lambda: known.unpaid_total),
    ):
        metrics.total("verdicts", text, total, outcome=outcome)
