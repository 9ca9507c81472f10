"""A request inside the engine, and what the engine says about it. Plain data."""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from engines.reference.handoff import Handoff
from engines.reference.sampling import SamplingParams

Tokens = npt.NDArray[np.int32]


class RequestKind(Enum):
    """What part of a request runs here; values are the request parameter `request_type`."""

    CONTEXT_AND_GENERATION = "context_and_generation"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """What the request met on its way to the first token. Nanoseconds on the engine's own monotonic clock;
    blocks counted.
    """

    alloc_total_blocks: int
    reused_blocks: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int

    @property
    def alloc_new_blocks(self) -> int:
        """Blocks this request filled or pulled itself."""
        return self.alloc_total_blocks - self.reused_blocks


@dataclass(slots=True)
class RequestOutput:
    """Something to tell the client: tokens since the last part, or the end. Parts of one request merge in order."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    perf: PerfMetrics | None = None
    handoff: bytes | None = None
    error: str | None = None
    is_final: bool = False
    is_complete: bool = False  # the answer's own end: a response with tensors, even without a token

    def merge(self, later: "RequestOutput") -> None:
        """Append a later part of the same request."""
        self.tokens.extend(later.tokens)
        self.log_probs.extend(later.log_probs)
        self.perf = self.perf or later.perf
        self.handoff = self.handoff or later.handoff
        self.error = self.error or later.error
        self.is_final = self.is_final or later.is_final
        self.is_complete = self.is_complete or later.is_complete


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated request. `prompt`: int32 [n], n >= 1, owned by the engine from here on."""

    key: int  # unique in this engine process
    request_id: str  # Triton's, may be empty or repeated
    kind: RequestKind
    prompt: Tokens
    output_tokens_max: int
    end_id: int = -1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    handoff: Handoff | None = None  # generation_only
    kv_peer: str | None = None  # dial this address and no other
    arrival_ns: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A submission with its tokens and blocks.

    tokens[0, computed) have their KV in the store; tokens[computed, length) are known but not computed;
    blocks[0, registered) are in the prefix table. Invariant while running: 0 <= computed < length <= len(tokens).
    """

    request: EngineRequest
    prompt_hashes: list[int]  # of the prompt's full blocks
    tokens: Tokens = field(init=False)
    length: int = field(init=False)
    computed: int = 0
    block_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    registered: int = 0
    last_hash: int | None = None  # of block registered - 1
    reused_blocks: int = 0
    is_pulling: bool = False
    has_chunk: bool = False  # a first prefill chunk has run
    first_scheduled_ns: int = 0
    has_output: bool = False

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.tokens = np.empty(len(prompt) + self.request.output_tokens_max, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.length = len(prompt)

    @property
    def generated(self) -> int:
        """Output tokens so far, the handed-over first one included."""
        return self.length - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Known tokens still to compute."""
        return self.length - self.computed

    def blocks_needed(self, block_tokens: int) -> int:
        """Blocks that let this sequence run to its end without asking for more."""
        prompt = len(self.request.prompt)
        total = (
            prompt
            if self.request.kind is RequestKind.CONTEXT_ONLY
            else prompt + self.request.output_tokens_max
        )
        return -(-total // block_tokens)

    def append(self, token: int) -> bool:
        """Add an output token; True when it is the last one."""
        self.tokens[self.length] = token
        self.length += 1
        return token == self.request.end_id or self.generated >= self.request.output_tokens_max


def as_block_ids(ids: List[int]) -> npt.NDArray[np.int32]:
    """Block ids in the form the arithmetic takes."""
    return np.asarray(ids, dtype=np.int32)
