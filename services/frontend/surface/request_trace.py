"""The trace of a request at its frontend: the propagated context, and the span and log line at the end."""

from __future__ import annotations

import logging
from typing import Any

from kvmesh.call import Call
from kvmesh.clock import wall_ns
from kvmesh.errors import MeshError
from kvmesh.telemetry import Tracing, format_traceparent
from services.frontend.requests.outcome import Outcome
from services.frontend.requests.request import LiveRequest

log = logging.getLogger(__name__)


class RequestTrace:
    """Trace of one call. `arrived_ns`: its arrival, Unix time in nanoseconds. `traceparent` goes to the routers."""

    __slots__ = ("_arrived_ns", "_context", "_parent_span_id", "_tracing", "traceparent")

    def __init__(self, tracing: Tracing, call: Call[Any, Any], arrived_ns: int) -> None:
        client = tracing.begin(call.metadata.get("traceparent"))
        self._tracing = tracing
        self._parent_span_id = client.span_id
        self._context = tracing.child(client)
        self._arrived_ns = arrived_ns
        self.traceparent = format_traceparent(self._context)

    def record(self, request: LiveRequest) -> None:
        """Record the span of the ended `request` if it is sampled; log a failure, except CLIENT_GONE, and a resume."""
        outcome = request.outcome
        assert outcome is not None
        if request.was_resumed:
            log.info("stream resumed", extra=_way(request, outcome))
        if outcome.error is not None and outcome.error.reason != "CLIENT_GONE":
            log.info(
                "request failed",
                extra={
                    "request_id": request.spec.request_id,
                    "outcome": outcome.name,
                    "pool": request.spec.pool,
                    "faults": [attempt.fault for attempt in request.attempts],
                    "tokens": len(request.progress.ids),
                },
            )
        if not self._context.sampled:
            return
        self._tracing.record_span(
            "frontend.generate",
            self._context,
            self._arrived_ns,
            wall_ns(),
            {
                "request_id": request.spec.request_id,
                "outcome": outcome.name,
                "pool": request.spec.pool,
                "model_version": request.spec.model_version,
                "prompt_tokens": request.spec.prompt_tokens,
                "output_tokens": len(request.progress.ids),
                "cached_tokens": request.progress.cached_tokens or 0,
                "recomputed_tokens": request.progress.recomputed_tokens,
                "attempts": len(request.attempts),
                "takeovers": request.takeovers,
            },
            parent_span_id=self._parent_span_id,
            error=outcome.name if isinstance(outcome.error, MeshError) else "",
        )


def _way(request: LiveRequest, outcome: Outcome) -> dict[str, Any]:
    """Return where the stream of `request` ran, in order, for a log line at its end."""
    return {
        "request_id": request.spec.request_id,
        "by_client": request.spec.execution.is_resumed,
        "takeovers": request.takeovers,
        "attempts": [
            {
                "position": each.start_position,
                "router": each.router,
                "replica": each.decode_replica,
                "fault": each.fault,
            }
            for each in request.attempts
        ],
        "outcome": outcome.name,
        "tokens": len(request.progress.ids),
    }
