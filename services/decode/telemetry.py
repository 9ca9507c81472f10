"""Spans and metrics of engine calls, made from the records of the core."""

from __future__ import annotations

from functools import partial

from kvmesh.clock import wall_ns
from kvmesh.metrics import Counter, Metrics
from kvmesh.telemetry import Tracing, parse_traceparent
from services.decode.core import DecodeCore
from services.decode.records import CallRecord


class CallTelemetry:
    """A Recorder."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._transfer = metrics.histogram(
            "transfer_seconds", "KV transfer: from the handoff to the engine's first answer."
        )
        self._local = metrics.histogram(
            "local_prefill_seconds",
            "From the engine call to its first answer, for prompts that decode computes itself.",
        )
        self._tokens = metrics.counter("generated_tokens", "Tokens made by ended engine calls.")
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
        self._tokens.value += record.tokens
        if record.answered_s is not None:
            (self._local if record.is_local else self._transfer).observe(record.answered_s - record.called_s)
        parent = parse_traceparent(record.traceparent) if record.traceparent else None
        if parent is None or not parent.sampled:
            return
        end_ns = wall_ns()
        answered_s = record.ended_s if record.answered_s is None else record.answered_s
        self._tracing.record_span(
            "engine generate",
            self._tracing.child(parent),
            end_ns - round((record.ended_s - record.called_s) * 1e9),
            end_ns,
            {
                "request_id": record.request_id,
                "attempt": record.attempt,
                "local": record.is_local,
                "first_answer_s": answered_s - record.called_s,
                "tokens": record.tokens,
                "reused_blocks": record.reused_blocks,
                "outcome": record.outcome,
            },
            parent_span_id=parent.span_id,
            error="" if record.outcome in ("length", "end_token", "cancelled") else record.outcome,
        )

    def _count_control_call(self, purpose: str, outcome: str) -> None:
        counter = self._control.get((purpose, outcome))
        if counter is None:
            about = "Engine calls for the control plane that ended: warm-up and probes."
            counter = self._metrics.counter("control_calls", about, purpose=purpose, outcome=outcome)
            self._control[purpose, outcome] = counter
        counter.value += 1


def export(core: DecodeCore, metrics: Metrics) -> None:
    """Export what the core holds, read at each scrape."""
    slot_table, generation = core.slot_table, core.generation
    metrics.gauge("slots", "Slots of users; finished logs do not count.", slot_table.user_count)
    metrics.gauge("pending_slots", "Slots of users that wait for a handoff.", slot_table.pending_user_count)
    metrics.gauge(
        "detached_slots",
        "Detached slots: their stream broke and waits for a takeover.",
        slot_table.detached_count,
    )
    metrics.gauge(
        "closed_window_slots",
        "Slots with a closed client flow-control window (backpressure).",
        lambda: len(slot_table.closed_windows),
    )
    for cause in core.slow_reader_cuts:
        metrics.total(
            "slow_reader_cuts",
            "Slots ended because their client did not read: by the slow-reader time, or by the share of slots.",
            partial(core.slow_reader_cuts.__getitem__, cause),
            cause=cause,
        )
    metrics.gauge("finished_slots", "Finished logs kept for a takeover.", lambda: len(slot_table.finished))
    metrics.gauge("reserved_blocks", "KV blocks reserved.", lambda: slot_table.reservations.reserved)
    metrics.gauge("kv_blocks", "KV blocks of the engine.", lambda: slot_table.reservations.total)
    metrics.gauge(
        "kv_used_ratio",
        "Reserved KV blocks over all KV blocks of the engine, 0 to 1.",
        lambda: slot_table.reservations.reserved / (slot_table.reservations.total or 1),
    )
    metrics.gauge("running_requests", "Calls of users in the engine.", lambda: generation.running_count)
    metrics.gauge("log_bytes", "Output ids kept for slots.", slot_table.log_bytes)
    metrics.gauge("step_seconds", "Smoothed duration of an engine step.", lambda: generation.step_us() / 1e6)
    metrics.total(
        "sent_tokens", "Tokens of all engine calls of users so far.", lambda: generation.token_total
    )
    metrics.total("step_batch_flushes", "Step frames flushed so far.", lambda: generation.flush_total)
    metrics.gauge("engine_ready", "1 while the engine answers.", lambda: float(generation.is_ready))
    metrics.gauge(
        "aggregated",
        "1 while the engine takes no handoffs: it runs every prompt itself.",
        lambda: float(core.trial.is_aggregated),
    )
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
