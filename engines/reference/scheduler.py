"""The scheduler: continuous batching with chunked prefill, first come first served.

Pure. States of a sequence:

    waiting --admit--> running [pulling -> prefilling -> decoding] --remove--> gone

A sequence is admitted only when the blocks for its prompt and its whole output fit; all blocks are allocated at
admission. Therefore a running sequence is never preempted. The head of the queue waits for its blocks, and no later
request overtakes it (head-of-line blocking is accepted).
"""

from collections import deque
from dataclasses import dataclass, field

from engines.contract import errors
from engines.contract.errors import EngineError
from engines.contract.request import RequestKind
from engines.reference.block_pool import BlockPool, block_hash
from engines.reference.sequence import Sequence, as_block_ids


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The rows [start, start + count) of one sequence in a step: a prefill chunk or one decode row."""

    sequence: Sequence
    start: int
    count: int
    wants_logits: bool

    @property
    def is_prefill(self) -> bool:
        """True if these are prompt rows. Output rows are never recomputed: every sequence starts from its prompt."""
        return self.start < len(self.sequence.request.prompt)


@dataclass(slots=True)
class Scheduler:
    """Owns the waiting queue, the running batch and, through `pool`, the blocks of both.

    INVARIANTS:
    - len(running) <= running_max and len(waiting) <= queue_max;
    - a running sequence holds exactly the blocks for its prompt and output, a waiting sequence holds none;
    - a step computes at most step_tokens_max rows.
    """

    pool: BlockPool
    running_max: int
    step_tokens_max: int
    queue_max: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)  # by key, in order of admission
    misses_cache: bool = False  # fault injection: no cached prefix is reused
    _waiting_keys: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not 1 <= self.running_max <= self.step_tokens_max:
            raise ValueError(
                f"need 1 <= running_max <= step_tokens_max, got {self.running_max}, {self.step_tokens_max}"
            )

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence; raises EngineError if the queue is full or the sequence can never fit into the pool."""
        needed = sequence.blocks_needed(self.pool.block_tokens)
        if needed > self.pool.block_count:
            raise EngineError(errors.KV_POOL_TOO_SMALL.format(needed=needed, total=self.pool.block_count))
        if len(self.waiting) >= self.queue_max:
            raise EngineError(errors.QUEUE_FULL.format(limit=self.queue_max))
        self.waiting.append(sequence)
        self._waiting_keys.add(sequence.request.key)

    def admit(self, now_ns: int) -> list[Sequence]:
        """Start waiting sequences from the head of the queue while they fit; allocate the blocks of each."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self.running_max and self._can_start(self.waiting[0]):
            sequence = self.waiting.popleft()
            self._waiting_keys.discard(sequence.request.key)
            self._start(sequence, now_ns)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[ScheduledChunk]:
        """Return the next step: one row per decoding sequence, then prefill chunks.

        Prefill chunks come in order of admission, until the step has step_tokens_max rows.
        """
        budget = self.step_tokens_max
        ready = [
            sequence for sequence in self.running.values() if not sequence.is_pulling and not sequence.is_hung
        ]
        chunks: list[ScheduledChunk] = []
        for sequence in ready:
            if sequence.generated:
                chunks.append(ScheduledChunk(sequence, sequence.computed, 1, True))
                budget -= 1
        for sequence in ready:
            if budget == 0:
                break
            if not sequence.generated:
                count = min(budget, sequence.pending)
                assert count >= 1, "a prefilling sequence has no row left to compute"
                chunks.append(ScheduledChunk(sequence, sequence.computed, count, count == sequence.pending))
                budget -= count
        return chunks

    def commit(self, chunk: ScheduledChunk) -> None:
        """Advance a sequence after a step: the rows of `chunk` are in the store. Register the blocks they filled."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        sequence.has_chunk = True
        self.register(sequence)

    def pulled(self, sequence: Sequence) -> None:
        """End the KV transfer of `sequence`: all its prompt rows are in the store."""
        sequence.is_pulling = False
        sequence.computed = len(sequence.request.prompt)
        self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        """Put the full, computed blocks of `sequence` into the prefix table."""
        if not self.pool.prefix_reuse:
            return
        width = self.pool.block_tokens
        while (sequence.registered + 1) * width <= sequence.computed:
            index = sequence.registered
            tokens = sequence.tokens[index * width : (index + 1) * width].astype("<i4", copy=False).tobytes()
            if index < len(sequence.prompt_hashes):
                value = sequence.prompt_hashes[index]
            else:
                value = block_hash(
                    tokens, self.pool.root if sequence.last_hash is None else sequence.last_hash
                )
            block_id = int(sequence.block_ids[index])
            sequence.block_ids[index] = self.pool.register(block_id, value, sequence.last_hash, tokens)
            sequence.last_hash = value
            sequence.registered = index + 1

    def remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Remove a waiting or running sequence and release its blocks. Idempotent.

        With `keep_blocks` the blocks stay held: a handoff owns them from here on.
        """
        key = sequence.request.key
        if key in self._waiting_keys:
            self._waiting_keys.discard(key)
            self.waiting.remove(sequence)
        elif self.running.pop(key, None) is not None and not keep_blocks:
            self.pool.release(sequence.block_ids.tolist())

    def assert_consistent(self) -> None:
        """Raise AssertionError if an invariant of this class or its pool does not hold."""
        self.pool.assert_consistent()
        assert len(self.running) <= self.running_max and len(self.waiting) <= self.queue_max
        assert {sequence.request.key for sequence in self.waiting} == self._waiting_keys
        assert not self._waiting_keys & self.running.keys()
        for sequence in self.running.values():
            assert len(sequence.block_ids) == sequence.blocks_needed(self.pool.block_tokens)
            assert 0 <= sequence.computed < sequence.length <= len(sequence.tokens)
            assert sequence.generated == 0 or sequence.is_pulling or sequence.pending == 1

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of the longest reusable prefix.

        A sequence with prefill recomputes at least the last prompt token, because its logits are needed.
        """
        if not self.pool.prefix_reuse or self.misses_cache:
            return []
        prompt = len(sequence.request.prompt)
        last = prompt if sequence.request.kind is RequestKind.GENERATION_ONLY else prompt - 1
        return self.pool.match(sequence.prompt_hashes[: last // self.pool.block_tokens])

    def _can_start(self, sequence: Sequence) -> bool:
        return self.pool.can_allocate(
            self._reusable(sequence), sequence.blocks_needed(self.pool.block_tokens)
        )

    def _start(self, sequence: Sequence, now_ns: int) -> None:
        matched = self._reusable(sequence)
        sequence.block_ids = as_block_ids(
            self.pool.allocate(matched, sequence.blocks_needed(self.pool.block_tokens))
        )
        sequence.reused_blocks = sequence.registered = len(matched)
        sequence.last_hash = sequence.prompt_hashes[len(matched) - 1] if matched else None
        sequence.computed = len(matched) * self.pool.block_tokens
        sequence.first_scheduled_ns = now_ns
        sequence.is_pulling = sequence.request.kind is RequestKind.GENERATION_ONLY
        self.running[sequence.request.key] = sequence
