"""Traces: W3C context, sampling, spans recorded at their end. Logs as JSON lines."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.config_sections import Telemetry
from kvmesh.telemetry import (
    TraceContext,
    Tracing,
    format_traceparent,
    is_sampled,
    parse_traceparent,
    start_logging,
    tracing_of,
)


def in_memory(role: str, instance: str) -> tuple[Tracing, InMemorySpanExporter]:
    """Return tracing that samples everything into a list."""
    exporter = InMemorySpanExporter()
    return Tracing(role, instance, 1.0, SimpleSpanProcessor(exporter)), exporter


contexts = st.builds(
    TraceContext, st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans()
)


@given(contexts, st.booleans())
def test_traceparent_round_trip(context: TraceContext, as_bytes: bool) -> None:
    """A process reads the header that another one formats, as text or as bytes."""
    text = format_traceparent(context)
    assert len(text) == 55
    assert parse_traceparent(text.encode() if as_bytes else text) == context


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        b"\xff\xfe",
    ],
)
def test_an_invalid_traceparent_has_no_context(value: str | bytes) -> None:
    """A malformed header starts a new trace instead of joining a wrong one."""
    assert parse_traceparent(value) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    """The standard requires to accept higher versions with more fields."""
    assert parse_traceparent("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more") == TraceContext(
        0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True
    )


@given(st.integers(0, (1 << 128) - 1), st.floats(0, 1), st.floats(0, 1))
def test_sampling_is_monotone_in_the_ratio(trace_id: int, one: float, other: float) -> None:
    """A process with a higher ratio traces all traces of a process with a lower ratio."""
    low, high = sorted((one, other))
    assert is_sampled(trace_id, high) or not is_sampled(trace_id, low)
    assert is_sampled(trace_id, 1.0)
    assert not is_sampled(trace_id, 0.0)


def test_spans_carry_their_own_ids_times_and_parents() -> None:
    """A span recorded at its end equals a span that was open all the time."""
    tracing, exported = in_memory("router", "router-0")
    root = tracing.child(tracing.begin())
    queued = tracing.child(root)
    tracing.record_span("queue", queued, 10, 30, {"blocks": 3}, parent_span_id=root.span_id)
    tracing.record_span("request", root, 5, 40, error="REPLICA_LOST")
    queue, request = exported.get_finished_spans()
    assert (queue.name, queue.start_time, queue.end_time) == ("queue", 10, 30)
    assert queue.context is not None
    assert queue.parent is not None
    assert (queue.context.trace_id, queue.context.span_id) == (root.trace_id, queued.span_id)
    assert queue.parent.span_id == root.span_id
    assert dict(queue.attributes or {}) == {"blocks": 3}
    assert queue.resource.attributes["service.name"] == "kvmesh-router"
    assert request.parent is None
    assert request.status.description == "REPLICA_LOST"


def test_the_sender_decides_whether_a_trace_is_sampled() -> None:
    """An arriving context keeps its flag. Only new traces are sampled here."""
    tracing, exported = in_memory("router", "router-0")
    context = tracing.begin(b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")
    assert not context.sampled
    tracing.record_span("request", tracing.child(context), 1, 2)
    assert exported.get_finished_spans() == ()
    assert tracing.begin("nonsense").sampled


def test_without_a_collector_contexts_are_still_propagated() -> None:
    """A process without export still passes the trace on."""
    tracing = tracing_of(Telemetry(sample_ratio=1.0), "decode", "decode-0")
    context = tracing.child(tracing.begin("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
    assert parse_traceparent(format_traceparent(context)) == context
    tracing.record_span("request", context, 1, 2)
    tracing.close()


def test_spans_are_batched_and_a_dead_collector_does_no_harm(free_port: int) -> None:
    """Spans go into a batch of bounded size. `close` returns although no collector listens."""
    config = Telemetry(otlp_endpoint=f"http://127.0.0.1:{free_port}", sample_ratio=1.0)
    tracing = tracing_of(config, "decode", "decode-0")
    tracing.record_span("request", tracing.child(tracing.begin()), 1, 2)
    tracing.close()


def test_an_unsampled_process_never_imports_the_sdk() -> None:
    """The SDK costs memory and start-up time. A process without a collector does not load it."""
    code = (
        "import sys; from kvmesh.telemetry import Tracing; t = Tracing('r', 'i', 0.0);"
        "t.record_span('x', t.child(t.begin()), 1, 2); assert not any('opentelemetry' in m for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_ids_come_from_the_given_source() -> None:
    """A test can make a trace repeatable."""
    tracing = Tracing("r", "i", 0.5, random_bits=lambda bits: (1 << bits) - 2)
    context = tracing.begin()
    assert context == TraceContext((1 << 128) - 2, 0, False)
    assert tracing.child(context).span_id == (1 << 64) - 2


def test_callers_cannot_write_tracebacks_into_the_log(restore_logging: None) -> None:
    """grpcio logs faults of callers as bugs; these are filtered. Its own bugs are still logged."""
    stream = io.StringIO()
    start_logging("info", "router", "router-0", stream)
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("Invalid encoding on %s", b"\xff")
    log.error("ExecuteBatchError raised in core by servicer method [/a/b]")
    log.error("another fault")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["another fault"]


def test_log_lines_are_json_with_fields(restore_logging: None) -> None:
    """One event is one line, with the fields of `extra` and a traceback if there is one."""
    stream = io.StringIO()
    start_logging("info", "router", "router-0", stream)
    log = logging.getLogger("kvmesh.test")
    log.info("request refused", extra={"request_id": "ab", "queue": 7})
    log.debug("not shown")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("bug")
    refused, bug = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert refused["event"] == "request refused"
    assert (refused["request_id"], refused["queue"], refused["id"], refused["level"]) == (
        "ab",
        7,
        "router-0",
        "info",
    )
    assert "two\nlines" in bug["traceback"]
