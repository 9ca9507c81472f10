"""Data types of a request inside the engine: the request, its sequence, and its outputs."""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.contract.request import EngineRequest, RequestKind, Tokens
from engines.reference.handoff import Handoff


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


@dataclass(frozen=True, slots=True)
class ReferenceRequest(EngineRequest):
    """A request with what this engine has read in it."""

    handoff: Handoff | None = None  # for generation_only
    compiled_guide: Guide | None = None  # its state before the output; None: the engine compiles it


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its tokens and KV cache blocks.

    tokens[0, computed) have their KV in the store. tokens[computed, length) are known but not computed.
    blocks[0, registered) are in the prefix table. INVARIANT while running: 0 <= computed < length <= len(tokens).
    """

    request: ReferenceRequest
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

    @property
    def takes_most_likely(self) -> bool:
        """True if each output token is the most likely one of the raw logits, and no other token is asked for."""
        request = self.request
        changes = request.guide is not None or not request.adjustments.change_nothing
        return request.sampling.is_greedy and not changes and not request.sampling.top_log_probs

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
