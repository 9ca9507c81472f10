"""Traces and logs of one process.

The sampling decision is made here, before any call of the OpenTelemetry SDK. Most requests are not traced, and must cost
nothing. Spans are built at the end of an operation, from its recorded times, so no span object travels through the code.
Logs are JSON lines on stderr, one per event.

W3C trace context: https://www.w3.org/TR/trace-context/ (version 00).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from kvmesh.config_sections import Telemetry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

Attribute = str | bool | int | float

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW_64: Final = (1 << 64) - 1
_SPAN_QUEUE_MAX: Final = 2048
"""Spans that wait for export. A full queue drops the oldest span."""


class TraceContext(NamedTuple):
    """Position of an operation in a trace. `span_id` is the span of its caller."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(value: str | bytes) -> TraceContext | None:
    """Return the context in `value`, or None for an invalid traceparent. Then a new trace starts."""
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceContext(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))


def format_traceparent(context: TraceContext) -> str:
    """Return `context` as the 55 characters of a traceparent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.sampled):02x}"


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Return True for `ratio` of all trace ids. All processes make the same decision for a trace.

    It compares the low 64 bits, like OpenTelemetry's TraceIdRatioBased. Pure.
    """
    return (trace_id & _LOW_64) < round(ratio * (1 << 64))


class Tracing:
    """Starts traces, derives child contexts, and records finished spans.

    It owns its span processor: call `close` once, in main. Without a processor, contexts are still propagated, and nothing
    is recorded.
    """

    def __init__(
        self,
        role: str,
        instance: str,
        sample_ratio: float,
        processor: SpanProcessor | None = None,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._processor = processor
        self._sample_ratio = sample_ratio
        self._random_bits = random_bits
        self._resource = {"service.name": f"kvmesh-{role}", "service.instance.id": instance}

    def begin(self, traceparent: str | bytes | None = None) -> TraceContext:
        """Return the context of an arriving request: the context of the sender, or a new trace."""
        if traceparent and (context := parse_traceparent(traceparent)) is not None:
            return context
        trace_id = self._random_bits(128) or 1
        return TraceContext(trace_id, 0, is_sampled(trace_id, self._sample_ratio))

    def child(self, parent: TraceContext) -> TraceContext:
        """Return a context with a new span id, for propagation and later for `record_span`.

        An unsampled trace needs ids too, for a valid traceparent. Each takes one random number.
        """
        return parent._replace(span_id=self._random_bits(64) or 1)

    def record_span(
        self,
        name: str,
        context: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        parent_span_id: int = 0,
        error: str = "",
    ) -> None:
        """Record the span `context.span_id`, from `start_ns` to `end_ns` (nanoseconds since 1970).

        `parent_span_id` 0 makes it the root. `error` is an error reason, never the text of an exception. Does nothing for
        an unsampled trace.
        """
        if not context.sampled or self._processor is None:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(context.trace_id, parent_span_id, True, flags) if parent_span_id else None
        span = ReadableSpan(
            name,
            context=SpanContext(context.trace_id, context.span_id, False, flags),
            parent=parent,
            resource=Resource(self._resource),
            attributes=attributes or {},
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Export the waiting spans, for at most a few seconds, and stop. It blocks: call it after the event loop's work."""
        if self._processor is not None:
            self._processor.shutdown()


def tracing_of(config: Telemetry, role: str, instance: str) -> Tracing:
    """Return the tracing of a process. Spans go to the configured collector in batches, or nowhere without one."""
    if not config.otlp_endpoint:
        return Tracing(role, instance, config.sample_ratio)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(
        endpoint=config.otlp_endpoint, insecure=config.otlp_endpoint.startswith("http://"), timeout=5
    )
    processor = BatchSpanProcessor(exporter, max_queue_size=_SPAN_QUEUE_MAX)
    return Tracing(role, instance, config.sample_ratio, processor)


_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_CALLER_CAUSED: Final = ("Invalid encoding on ", "ExecuteBatchError raised in core by servicer method ")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, role, id, logger, event, the fields of `extra`."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self._always = {"role": role, "id": instance}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time_s": round(record.created, 6),
            "level": record.levelname.lower(),
            **self._always,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _RECORD_FIELDS)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def start_logging(level: str, role: str, instance: str, stream: TextIO | None = None) -> None:
    """Send all records of at least `level` to `stream` (default stderr) as JSON lines.

    Called once, by main. Fields go into `extra`:
    `log.info("request refused", extra={"request_id": request_id})`.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(role, instance))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_own_record)


def _is_own_record(record: logging.LogRecord) -> bool:
    """Return False for tracebacks of grpcio that any caller can cause, with undecodable headers or a disconnect."""
    return not str(record.msg).startswith(_CALLER_CAUSED)
