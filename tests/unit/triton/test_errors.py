"""The table from Triton's texts and codes to typed errors."""

from __future__ import annotations

import grpc
import pytest

from engines.contract import errors as engine_texts
from kvmesh.triton import errors
from kvmesh.triton.errors import (
    CallError,
    EngineBusy,
    EngineError,
    EngineLost,
    EngineStalled,
    HandoffLost,
    InvalidRequest,
    NoHandoff,
)
from tests.fakes.stock_backend import texts as stock


def failed(reason: str) -> str:
    """Return a fault of the executor with TensorRT-LLM's text."""
    return engine_texts.EXECUTOR_FAILED.format(request="r", reason=reason)


TEXTS: list[tuple[str, type[CallError]]] = [
    (engine_texts.MISSING_INPUT.format(field="input_ids"), InvalidRequest),
    (engine_texts.BAD_VALUE.format(field="temperature", value="nan", allowed=">= 0"), InvalidRequest),
    (engine_texts.PROMPT_TOO_LONG.format(prompt=9, output=9, limit=10), InvalidRequest),
    (engine_texts.KV_POOL_TOO_SMALL.format(needed=9, total=8), InvalidRequest),
    (engine_texts.CONTEXT_PARAMS_MISSING, InvalidRequest),
    (engine_texts.QUEUE_FULL.format(limit=3), EngineBusy),
    ("Exceeds maximum queue size", EngineBusy),
    ("Request timeout expired", EngineBusy),
    (engine_texts.HANDOFF_MALFORMED.format(reason="truncated or altered"), HandoffLost),
    (engine_texts.HANDOFF_MISMATCH.format(reason="made for another prompt"), HandoffLost),
    (engine_texts.SOURCE_NOT_REGISTERED.format(named="a:1", registered="b:2"), HandoffLost),
    (failed(engine_texts.HANDOFF_UNKNOWN.format(handoff=3, peer="a:1")), HandoffLost),
    (failed(engine_texts.TRANSFER_FAILED.format(reason="connection refused")), HandoffLost),
    (
        "Error encountered while populating response: contextParams must be present in the response",
        NoHandoff,
    ),
    (stock.no_handoff(), NoHandoff),
    (stock.no_input_ids(), InvalidRequest),
    (stock.NO_OUTPUT_LENGTH, InvalidRequest),
    (stock.failed(7, stock.too_long(600, 511)), InvalidRequest),
    (stock.queue_full(3), EngineBusy),
    (
        stock.failed(7, stock.in_forward("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMemcpyAsync")),
        EngineError,
    ),
    (stock.failed(7, "LoRA task 3 not found in cache. Please send LoRA weights with request"), EngineError),
    (stock.failed(7, stock.not_in_world()), EngineError),
    (stock.failed_check("topP.value() <= 1.f", "executor/samplingConfig.cpp:316"), EngineError),
    (stock.STOP_WITHOUT_ID, EngineError),
    (stock.failed(7, engine_texts.SHUTTING_DOWN), EngineLost),
    (engine_texts.SHUTTING_DOWN, EngineLost),
    ("Request for unknown model: 'tensorrt_llm' has no available versions", EngineLost),
    (
        "Failed to process the request(s) for model 'tensorrt_llm', message: Stub process is not healthy",
        EngineLost,
    ),
    (engine_texts.ENGINE_FAULT.format(reason="ValueError"), EngineError),
    (failed("CUDA error: an illegal memory access was encountered"), EngineError),
    ("something unknown", EngineError),
]


@pytest.mark.parametrize(("text", "kind"), TEXTS)
def test_text_decides_the_kind(text: str, kind: type[CallError]) -> None:
    """Every known text of an engine or Triton becomes its type, in any case of letters."""
    assert type(errors.of_text(text)) is kind
    assert type(errors.of_text(text.upper())) is kind


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", EngineLost),
        (grpc.StatusCode.UNAVAILABLE, "", EngineLost),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", EngineBusy),
        (grpc.StatusCode.NOT_FOUND, "", EngineLost),
        (grpc.StatusCode.CANCELLED, "", EngineLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", EngineStalled),
        (grpc.StatusCode.INVALID_ARGUMENT, "what", InvalidRequest),
        (grpc.StatusCode.INTERNAL, "what", EngineError),
        (grpc.StatusCode.UNKNOWN, "", EngineError),
    ],
)
def test_code_decides_for_an_unknown_text(code: grpc.StatusCode, details: str, kind: type[CallError]) -> None:
    """A broken call is typed by its text if the text is known, otherwise by its code."""
    assert type(errors.of_status(code, details)) is kind


def test_texts_are_bounded() -> None:
    """A long text is shortened."""
    assert len(str(errors.of_text("x" * 10_000))) == errors.TEXT_MAX
