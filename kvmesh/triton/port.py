"""What a service's core sees of its engine: calls it starts, and a sink that hears what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvmesh.triton.errors import CallError


class CallKind(Enum):
    """What a call runs; values are the engine's request parameter `request_type`."""

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call to the engine. `request_id` is unique among live calls of this engine."""

    kind: CallKind
    request_id: str
    token_ids: bytes
    """Prompt: 4 bytes per token, little-endian, at least one token."""
    max_output_tokens: int
    """Counts the prefill's first token too."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    end_token_id: int = -1
    """Negative: none."""
    logprobs: bool = False
    context_phase_params: bytes = b""
    """GENERATION_ONLY: the handoff, as the prefill engine gave it."""
    kv_peer: str = ""
    """GENERATION_ONLY: the only address KV blocks may be pulled from. Empty: the engine does not check."""
    timeout_s: float = 600.0
    """The last resort: the transport ends the call after this. Above every deadline and watchdog of the caller."""


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What the engine says once, with its first answer to a call."""

    context_phase_params: bytes = b""
    """CONTEXT_ONLY: the handoff. The engine holds its blocks until they are pulled, released or timed out."""
    reused_blocks: int = 0
    """Blocks of the prompt that were in the engine's cache."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own load report. Blocks, sequences; seconds."""

    boot_id: str
    blocks_total: int
    blocks_free: int
    """Free, or evictable and not promised to anyone."""
    sequences_running: int = 0
    sequences_waiting: int = 0
    handoffs_held: int = 0
    step_s: float = 0.0
    """Smoothed duration of a step; 0: unknown."""


class EngineSink(Protocol):
    """Hears what becomes of calls. Synchronous. A call's last word is exactly one of `on_end` and `on_error`."""

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        """The engine answered for the first time; `on_tokens` follows with that answer's tokens."""
        ...

    def on_tokens(
        self, call_id: int, token_ids: Sequence[int], logprobs: Sequence[float], now_s: float
    ) -> None:
        """Tokens made since the last answer, at least one. `logprobs` is parallel to them, or empty."""
        ...

    def on_end(self, call_id: int, now_s: float) -> None:
        """The engine finished the call. Below its limit of tokens the answer ended by itself, whatever its last token is:
        TensorRT-LLM leaves the end token out, and an answer that is nothing else is empty."""
        ...

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        """The call failed; nothing of it is left in the engine."""
        ...

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        """The engine reported its load. Another boot id than before means that it lost everything."""
        ...

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        """The engine began or ceased to answer. Calls end on their own: with `on_error`."""
        ...


class EnginePort(Protocol):
    """Starts and ends calls. Synchronous: never calls the sink from inside one of these methods."""

    def start(self, call_id: int, call: EngineCall) -> None:
        """Start `call` under a number the caller never uses twice."""
        ...

    def cancel(self, call_id: int) -> None:
        """End a call early; the sink hears no more of it. Unknown ids are ignored.

        Whatever the call still makes in the engine - a handoff that was ready at the same moment - is given up too.
        """
        ...

    def release(self, context_phase_params: bytes) -> None:
        """Give up a handoff the engine holds. Idempotent: one that is gone already is fine."""
        ...

    def open_calls(self) -> int:
        """Return the calls that have not ended in the transport, cancelled ones included."""
        ...
