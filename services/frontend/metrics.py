"""Metrics of a frontend.

One series per outcome, fixed at start (bounded cardinality), so that a scrape shows zeros.
"""

from __future__ import annotations

from kvmesh.errors import TABLE, MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.metrics import Counter, Metrics
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.settlement import Charge
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.outcome import outcome_of
from services.frontend.requests.request import LiveRequest


class RequestMetrics:
    """Counts requests as they end, in all and by tenant. Implements core.Observer."""

    def __init__(self, metrics: Metrics, tenants: TenantMetrics) -> None:
        self._tenants = tenants
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
