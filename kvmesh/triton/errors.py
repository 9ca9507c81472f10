"""Typed errors of engine calls, and the one table from Triton's texts and codes to them.

Triton's stream errors carry no code, and the TensorRT-LLM backend uses INTERNAL for all errors. So the text decides.
Sources of the texts: the README of the reference engine, the C++ backend of TensorRT-LLM, and tritonserver.
"""

from __future__ import annotations

import re
from typing import Final

import grpc


class CallError(Exception):
    """A call to the engine failed. The text is for logs and operators, never for clients."""


class EngineLost(CallError):
    """The engine or the connection to it is lost, or its model is not ready."""


class EngineBusy(CallError):
    """The queue of the engine is full. The engine did not take the call."""


class HandoffLost(CallError):
    """The KV blocks are unavailable: the handoff expired or was released, is for another request, or its engine is lost."""


class NoHandoff(HandoffLost):
    """A `context_only` call gave no handoff. TensorRT-LLM fails so where the first token ends the request."""


class InvalidRequest(CallError):
    """The engine refuses this request at every attempt."""


class InvalidToken(CallError):
    """The engine made a token id outside the request's vocabulary."""


class EngineStalled(CallError):
    """No token came for the time of the watchdog, or the call took longer than its timeout in the transport."""


class EngineError(CallError):
    """The engine failed at this call for any other reason."""


HANDOFF_FAULTS: Final = (HandoffLost, EngineError, EngineStalled)
"""Errors of a `generation_only` call by which handoffs do not work. A lost engine or a wrong request is no verdict."""

_TEXTS: Final[tuple[tuple[type[CallError], tuple[str, ...]], ...]] = (
    (NoHandoff, (r"contextParams must be",)),
    (
        HandoffLost,
        (
            r"KV handoff .* is unknown or expired",
            r"KV cache transfer failed",
            r"handoff does not belong",
            r"handoff names a KV source",
            r"context_phase_params is malformed",
            r"DISAGG_TRANS_ERROR",
        ),
    ),
    (EngineBusy, (r"maximum queue size", r"Request timeout expired")),
    (
        InvalidRequest,
        (
            r"Required input tensor",
            r"is not present in the request",
            r"Sparse list must not have",
            r"Invalid value for",
            r"exceeds? max.*(length|len|tokens)",
            r"KV cache blocks but the pool has only",
            r"context_phase_params must be set",
            r"unexpected inference input",
            r"unexpected shape for input",
            r"missing .* required input",
            r"expected .* inputs? but got",
            r"Streaming is only supported",
        ),
    ),
    (
        EngineLost,
        (
            r"shutting down",
            r"has no available versions",
            r"unknown model",
            r"is not ready",
            r"not found",
            r"unavailable",
            r"stub process",
            r"failed to connect",
            r"Connection refused",
            r"Socket closed",
            r"Server is stopping",
            r"Step stream is unknown",
            r"Internal error from Core",  # of grpc.aio, if the transport breaks during a write
        ),
    ),
)
"""The first match wins. Case is ignored."""

_TABLE: Final = tuple((kind, re.compile("|".join(texts), re.IGNORECASE)) for kind, texts in _TEXTS)

_ALIVE: Final = re.compile(
    r"Executor failed process|Error encountered while populating|\[TensorRT-LLM\]\[ERROR\]", re.IGNORECASE
)
"""Beginnings of texts that only a running engine writes. What is not found then is not the engine."""

_CODES: Final[dict[grpc.StatusCode, type[CallError]]] = {
    grpc.StatusCode.UNAVAILABLE: EngineLost,
    grpc.StatusCode.NOT_FOUND: EngineLost,
    grpc.StatusCode.CANCELLED: EngineLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: EngineStalled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,  # a message beyond the transport's limit
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
}

_STREAM_UNKNOWN: Final = re.compile("Step stream is unknown")

_STOPS: Final = re.compile("shutting down", re.IGNORECASE)

TEXT_MAX: Final = 400


def of_text(text: str) -> CallError:
    """Return the typed error for an error text of Triton."""
    is_alive = _ALIVE.match(text) is not None and not _STOPS.search(text)
    for kind, pattern in _TABLE:
        if pattern.search(text) and not (is_alive and kind is EngineLost):
            return kind(text[:TEXT_MAX])
    return EngineError(text[:TEXT_MAX])


def is_stream_unknown(text: str) -> bool:
    """True if the engine does not know the step stream that a request names."""
    return _STREAM_UNKNOWN.search(text) is not None


def of_status(code: grpc.StatusCode, details: str) -> CallError:
    """Return the typed error for a broken call, by its text if the text is known, otherwise by its code."""
    for kind, pattern in _TABLE:
        if pattern.search(details):
            return kind(details[:TEXT_MAX])
    return _CODES.get(code, EngineError)(f"{code.name}: {details}"[:TEXT_MAX])
