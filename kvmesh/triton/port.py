"""The interface between a service's core and its engine: calls that the core starts, and a sink of their events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvmesh.triton.errors import CallError


class CallKind(Enum):
    """The phases that a call runs. Values are those of the engine's request parameter `request_type`."""

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


class GuideKind(Enum):
    """Forms of a guided output. Values of the engine's input `guided_decoding_guide_type`."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingExtras:
    """Sampling parameters that few requests have. The defaults change nothing."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, value that is added to its logit)."""
    min_tokens: int = 0
    """Output tokens of this call before an end token is allowed."""
    alternatives: int = 0
    """Most likely tokens to return beside each token."""
    guide_kind: GuideKind | None = None
    guide: str = ""
    output_start: int = 0
    """Position in the prompt at which the request's output began, for penalties and guides."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call to the engine. `request_id` is unique among live calls of this engine."""

    kind: CallKind
    request_id: str
    token_ids: bytes
    """The prompt: 4 bytes per token, little-endian, at least one token."""
    max_output_tokens: int
    """Includes the first token, which the prefill makes."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    end_token_id: int = -1
    """Negative: no end token."""
    further_end_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    extras: SamplingExtras | None = None
    """Further parameters; None: all of them at their defaults."""
    context_phase_params: bytes = b""
    """GENERATION_ONLY: the handoff of the prefill engine."""
    kv_peer: str = ""
    """GENERATION_ONLY: the only address from which KV blocks may be pulled. Empty: the engine does not check."""
    timeout_s: float = 600.0
    """Last resort: the transport ends the call after this time. It is above each deadline and watchdog of the caller."""


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """Data that the engine sends once, with its first answer to a call."""

    context_phase_params: bytes = b""
    """CONTEXT_ONLY: the handoff. The engine holds its blocks until they are pulled or released, or until a timeout."""
    reused_blocks: int = 0
    """Blocks of the prompt that were in the engine's cache."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load report of an engine, in blocks, sequences and seconds."""

    boot_id: str
    blocks_total: int
    blocks_free: int
    """Free blocks, and evictable blocks without a reservation."""
    sequences_running: int = 0
    sequences_waiting: int = 0
    handoffs_held: int = 0
    step_s: float = 0.0
    """Smoothed duration of a step; 0: unknown."""
    resident_bytes: int = 0
    """Resident memory (RSS) of the engine's process; 0: unknown."""
    cold_steps: int | None = None
    """Steps since boot that took longer because a shape was cold; None: the engine does not report them."""


class EngineSink(Protocol):
    """Receives the events of calls. Synchronous. INVARIANT: a call ends with exactly one of `on_end` and `on_error`."""

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        """Take the engine's first answer. `on_tokens` follows with the tokens of that answer."""
        ...

    def on_tokens(
        self,
        call_id: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        now_s: float,
        alternatives: bytes = b"",
    ) -> None:
        """Take the tokens since the last answer, at least one. `logprobs` is parallel to them, or empty.

        `alternatives`: as in frames.Row, or empty.
        """
        ...

    def on_end(self, call_id: int, now_s: float) -> None:
        """Take the good end of a call.

        A call with fewer tokens than its limit ended by itself, whatever its last token is. TensorRT-LLM omits the end
        token, so an answer of the end token alone is empty.
        """
        ...

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        """Take the failure of a call. The engine holds nothing of the call any more."""
        ...

    def on_step(self, now_s: float) -> None:
        """Take the end of a step: the events of all calls of it have come. Only an engine with step frames tells it."""
        ...

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        """Take a load report. A new boot id means that the engine lost all its state."""
        ...

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        """Take whether the engine answers. Its calls end separately, with `on_error`."""
        ...


class EnginePort(Protocol):
    """Starts and ends calls. Synchronous. These methods never call the sink."""

    def start(self, call_id: int, call: EngineCall) -> None:
        """Start `call` under a number that the caller never reuses."""
        ...

    def cancel(self, call_id: int) -> None:
        """End a call early. The sink gets no more events of it. Unknown ids are ignored.

        A handoff that the call makes at the same moment is released as well, if the engine can stop calls
        (ModelFacts.stop).
        """
        ...

    def release(self, context_phase_params: bytes) -> None:
        """Release a handoff that the engine holds. Idempotent: an unknown handoff is no error."""
        ...

    def open_calls(self) -> int:
        """Return the number of calls that are open in the transport, cancelled calls included."""
        ...
