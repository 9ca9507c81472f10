"""Data types of a request, as the contract defines it: kind, prompt, sampling, guide, handoff. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from engines.contract.guide_text import GuideText

Tokens = npt.NDArray[np.int32]


class RequestKind(Enum):
    """The phases of a request that run on this engine; values of the request parameter `request_type`."""

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


class ControlRequest(Enum):
    """Kinds of requests that generate no tokens; values of the request parameter `request_type`."""

    KV_EVENTS = "kv_events"
    LOAD_REPORT = "load_report"
    RELEASE_HANDOFF = "release_handoff"
    STEP_STREAM = "step_stream"
    STEP_CANCEL = "step_cancel"
    STOP = "stop"  # set by the tensor `stop`, not by the parameter


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the values in a request."""

    vocab_size: int
    max_sequence_tokens: int
    has_guides: bool = False
    lora_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of the response, from the request's tensors."""

    is_streaming: bool = False
    has_perf: bool = False
    has_log_probs: bool = False


@dataclass(frozen=True, slots=True)
class EventCursor:
    """The position of a subscriber in the stream of KV events: the last event it has received."""

    boot_id: str
    event_id: int


@dataclass(frozen=True, slots=True)
class StepSlot:
    """Where the outputs of a request go instead of its own responses: a slot of a step stream."""

    stream: str
    slot: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    Greedy: temperature 0 or top_k 1. Cuts are off with top_k 0, and with top_p <= 0 or >= 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    log_probs: bool = False
    top_log_probs: int = 0
    """Most likely tokens to report beside each token, with their log-probabilities."""

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken without a random draw."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Changes of the logits before a token is drawn. The defaults change nothing."""

    frequency_penalty: float = 0.0
    """Subtracted for each time that a token is in the output."""
    presence_penalty: float = 0.0
    """Subtracted once for each token of the output."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of each token of prompt and output, and multiplies the negative ones."""
    bias: npt.NDArray[np.float32] | None = None
    """Added to the logits, [vocabulary]."""
    output_tokens_min: int = 0
    """Output tokens of this call before an end token is allowed."""

    @property
    def change_nothing(self) -> bool:
        """True for the defaults."""
        return (
            self.bias is None
            and not self.output_tokens_min
            and (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        )


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """The priority of the KV cache blocks of prompt tokens [start, end). No `end`: up to the end of the prompt."""

    start: int
    end: int | None
    priority: int  # 0..100; a block of a lower priority is evicted first
    duration_ms: int | None  # None: for ever


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the KV cache keeps the blocks of a request."""

    ranges: tuple[RetentionRange, ...]
    decode_priority: int = 35  # of generated blocks
    decode_duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated request. `prompt` is int32 [n], n >= 1; the engine owns it from here on."""

    key: int  # unique in this engine process
    request_id: str  # Triton's request id; may be empty, need not be unique
    kind: RequestKind
    prompt: Tokens
    output_tokens_max: int
    end_ids: frozenset[int] = frozenset()
    output_start: int | None = None  # where the request's output begins in the prompt; None: behind it
    adjustments: Adjustments = field(default_factory=Adjustments)
    guide: GuideText | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    context_phase_params: bytes = b""  # the handoff blob of a generation_only request, as the engine made it
    kv_peer: str | None = None  # the only address that KV may be pulled from; None: the handoff's address
    arrival_ns: int = 0
    lora_id: int | None = None  # one of the model's adapters; None: the model alone
    retention: Retention | None = None
