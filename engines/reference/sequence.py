"""Data types of a request inside the engine: the request, its sequence, and its outputs."""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.reference.adjustments import Adjustments
from engines.reference.guide_text import GuideText
from engines.reference.handoff import Handoff
from engines.reference.sampling import SamplingParams

Tokens = npt.NDArray[np.int32]


class Guide(Protocol):
    """The state of a guided output (see guides)."""

    @property
    def is_over(self) -> bool:
        """True if nothing may follow."""
        ...

    def consume(self, token: int) -> None:
        """Append a token. Raises EngineError."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return [vocabulary]: True for each token that may follow. Raises EngineError."""
        ...


class RequestKind(Enum):
    """The phases of a request that run on this engine; values of the request parameter `request_type`."""

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """Performance metrics up to the first token. Times are nanoseconds of the engine's own monotonic clock."""

    alloc_total_blocks: int
    reused_blocks: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int

    @property
    def alloc_new_blocks(self) -> int:
        """Number of blocks allocated for this request, the reused ones not counted."""
        return self.alloc_total_blocks - self.reused_blocks


@dataclass(slots=True)
class RequestOutput:
    """Output of a request: tokens since the last output, or the end. Outputs of one request merge in order."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)  # for each token, if the request asked for them
    top_log_probs: list[list[float]] = field(default_factory=list)
    perf: PerfMetrics | None = None
    handoff: bytes | None = None
    error: str | None = None
    is_final: bool = False
    is_complete: bool = False  # generation finished: the response has tensors, even without a token

    def merge(self, later: "RequestOutput") -> None:
        """Append a later output of the same request."""
        self.tokens.extend(later.tokens)
        self.log_probs.extend(later.log_probs)
        self.top_ids.extend(later.top_ids)
        self.top_log_probs.extend(later.top_log_probs)
        self.perf = self.perf or later.perf
        self.handoff = self.handoff or later.handoff
        self.error = self.error or later.error
        self.is_final = self.is_final or later.is_final
        self.is_complete = self.is_complete or later.is_complete


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
    compiled_guide: Guide | None = None  # its state before the output; None: the engine compiles it
    sampling: SamplingParams = field(default_factory=SamplingParams)
    handoff: Handoff | None = None  # for generation_only
    kv_peer: str | None = None  # the only address that KV may be pulled from; None: the handoff's address
    arrival_ns: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its tokens and KV cache blocks.

    tokens[0, computed) have their KV in the store. tokens[computed, length) are known but not computed.
    blocks[0, registered) are in the prefix table. INVARIANT while running: 0 <= computed < length <= len(tokens).
    """

    request: EngineRequest
    prompt_hashes: list[int]  # block hashes of the prompt's full blocks
    tokens: Tokens = field(init=False)
    length: int = field(init=False)
    computed: int = 0
    block_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    registered: int = 0
    last_hash: int | None = None  # block hash of block registered - 1
    reused_blocks: int = 0
    is_pulling: bool = False
    has_chunk: bool = False  # a first prefill chunk has run
    first_scheduled_ns: int = 0
    has_output: bool = False
    is_hung: bool = False  # fault injection: no further row is computed
    guide: Guide | None = None  # state of the request's guide; None before the first token
    guided: int = 0  # tokens[0, guided) are in the guide's state, or before the output
    error_after: int | None = None  # fault injection: output tokens before the request fails

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.tokens = np.empty(len(prompt) + self.request.output_tokens_max, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.length = len(prompt)

    @property
    def generated(self) -> int:
        """Number of output tokens so far, the first token of a handoff included."""
        return self.length - len(self.request.prompt)

    @property
    def output_start(self) -> int:
        """Position in `tokens` at which the request's output begins, in whichever call it was made."""
        start = self.request.output_start
        return len(self.request.prompt) if start is None else start

    @property
    def pending(self) -> int:
        """Number of known tokens that are not computed yet."""
        return self.length - self.computed

    def blocks_needed(self, block_tokens: int) -> int:
        """Return the number of blocks for the prompt and, unless context_only, the longest possible output."""
        prompt = len(self.request.prompt)
        total = (
            prompt
            if self.request.kind is RequestKind.CONTEXT_ONLY
            else prompt + self.request.output_tokens_max
        )
        return -(-total // block_tokens)

    def append(self, token: int) -> bool:
        """Append an output token; return whether the sequence ends with this token."""
        self.tokens[self.length] = token
        self.length += 1
        return token in self.request.end_ids or self.generated >= self.request.output_tokens_max


def as_block_ids(ids: List[int]) -> npt.NDArray[np.int32]:
    """Return block ids as the int32 array that the arithmetic takes."""
    return np.asarray(ids, dtype=np.int32)
