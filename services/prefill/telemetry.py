"""Spans and metrics of engine calls, made from the records of the core."""

from __future__ import annotations

from kvmesh.clock import wall_ns
from kvmesh.metrics import Counter, Metrics
from kvmesh.telemetry import Tracing, parse_traceparent
from services.prefill.core import PrefillCore
from services.prefill.records import CallRecord


class CallTelemetry:
    """A Recorder."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._queue = metrics.histogram("queue_seconds", "From the submit to the engine call.")
        self._prefill = metrics.histogram("prefill_seconds", "From the engine call to the first token.")
        self._cached = metrics.counter("cached_tokens", "Prompt tokens found in the engine's cache.")
        self._computed = metrics.counter("computed_tokens", "Prompt tokens computed.")
        self._ended: dict[str, Counter] = {}
        self._control: dict[tuple[str, str], Counter] = {}

    def __call__(self, record: CallRecord) -> None:
        """Count the call; record its span if its trace is sampled. A call of the control plane is counted apart."""
        if record.purpose:
            self._count_control_call(record.purpose, record.outcome)
            return
        outcome = self._ended.get(record.outcome)
        if outcome is None:
            outcome = self._ended[record.outcome] = self._metrics.counter(
                "engine_calls", "Engine calls that ended.", outcome=record.outcome
            )
        outcome.value += 1
        self._queue.observe(record.called_s - record.submitted_s)
        if record.outcome == "first_token":
            self._prefill.observe(record.ended_s - record.called_s)
            self._cached.value += record.cached_tokens
            self._computed.value += record.prompt_tokens - record.cached_tokens
        parent = parse_traceparent(record.traceparent) if record.traceparent else None
        if parent is None or not parent.sampled:
            return
        end_ns = wall_ns()
        self._tracing.record_span(
            "engine prefill",
            self._tracing.child(parent),
            end_ns - round((record.ended_s - record.called_s) * 1e9),
            end_ns,
            {
                "request_id": record.request_id,
                "attempt": record.attempt,
                "queue_s": record.called_s - record.submitted_s,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "outcome": record.outcome,
            },
            parent_span_id=parent.span_id,
            error="" if record.outcome in ("first_token", "end_token", "cancelled") else record.outcome,
        )

    def _count_control_call(self, purpose: str, outcome: str) -> None:
        counter = self._control.get((purpose, outcome))
        if counter is None:
            about = "Engine calls for the control plane that ended: warm-up and probes."
            counter = self._metrics.counter("control_calls", about, purpose=purpose, outcome=outcome)
            self._control[purpose, outcome] = counter
        counter.value += 1


def export(core: PrefillCore, metrics: Metrics) -> None:
    """Export what the core holds, read at each scrape."""
    slot_table, prefilling = core.slot_table, core.prefilling
    metrics.gauge("queued_requests", "Queued requests.", lambda: len(slot_table.queue))
    metrics.gauge("queued_tokens", "Queued prompt tokens.", lambda: slot_table.queue.tokens)
    metrics.gauge("running_requests", "Calls of users in the engine.", lambda: prefilling.running_count)
    metrics.gauge(
        "held_handoffs",
        "Held handoffs: finished prefills that decode has not fetched.",
        lambda: len(slot_table.held),
    )
    metrics.gauge(
        "reserved_blocks", "KV blocks of running calls and handoffs.", lambda: slot_table.blocks_reserved
    )
    metrics.gauge("kv_blocks", "KV blocks of the engine.", lambda: slot_table.blocks_total)
    metrics.gauge(
        "kv_used_ratio",
        "Reserved KV blocks over all KV blocks of the engine, 0 to 1.",
        lambda: slot_table.blocks_reserved / (slot_table.blocks_total or 1),
    )
    metrics.total(
        "assumed_end_tokens",
        "Calls without a handoff, answered with the end token alone, as the engine omits it.",
        lambda: prefilling.assumed_end_total,
    )
    metrics.gauge("engine_ready", "1 while the engine answers.", lambda: float(prefilling.is_ready))
    metrics.gauge(
        "control_running_requests",
        "Calls of the control plane in the engine: warm-up and probes.",
        lambda: slot_table.lane.running_count,
    )
    metrics.gauge(
        "control_waiting_requests",
        "Requests of the control plane that wait for their turn or for a handoff.",
        lambda: slot_table.lane.waiting_count,
    )
    metrics.gauge("control_blocks", "KV blocks that warm-up and probes hold.", lambda: slot_table.lane.blocks)
