"""Continuous batching with chunked prefill: who runs, and which rows the next step computes. Pure, first come
first served.

    waiting --admit--> running [pulling -> prefilling -> decoding] --remove--> gone

Admission never evicts a running sequence: a sequence is admitted only when the blocks for its prompt and all
its output fit, and it gets them all at once. The head of the queue waits for its blocks; nobody overtakes it.
"""

from collections import deque
from dataclasses import dataclass, field

from engines.reference import errors
from engines.reference.block_pool import BlockPool, block_hash
from engines.reference.errors import EngineError
from engines.reference.sequence import RequestKind, Sequence, as_block_ids


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Rows [start, start + count) of one sequence in this step."""

    sequence: Sequence
    start: int
    count: int
    wants_logits: bool

    @property
    def is_prefill(self) -> bool:
        """Whether these are prompt rows (recomputed output rows of nobody: every sequence starts from a prompt)."""
        return self.start < len(self.sequence.request.prompt)


@dataclass(slots=True)
class Scheduler:
    """Owns the queue, the running set and, through `pool`, their blocks.

    Invariants: len(running) <= running_max; len(waiting) <= queue_max; every running sequence holds exactly
    the blocks it needs to its end, no waiting one holds any; a step computes at most step_tokens_max rows.
    """

    pool: BlockPool
    running_max: int
    step_tokens_max: int
    queue_max: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)  # by key, in order of admission
    _waiting_keys: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not 1 <= self.running_max <= self.step_tokens_max:
            raise ValueError(
                f"need 1 <= running_max <= step_tokens_max, got {self.running_max}, {self.step_tokens_max}"
            )

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence; EngineError if the queue is full or it could never fit."""
        needed = sequence.blocks_needed(self.pool.block_tokens)
        if needed > self.pool.block_count:
            raise EngineError(errors.KV_POOL_TOO_SMALL.format(needed=needed, total=self.pool.block_count))
        if len(self.waiting) >= self.queue_max:
            raise EngineError(errors.QUEUE_FULL.format(limit=self.queue_max))
        self.waiting.append(sequence)
        self._waiting_keys.add(sequence.request.key)

    def admit(self, now_ns: int) -> list[Sequence]:
        """Start as many waiting sequences as fit, from the head; each holds its blocks from here on."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self.running_max and self._can_start(self.waiting[0]):
            sequence = self.waiting.popleft()
            self._waiting_keys.discard(sequence.request.key)
            self._start(sequence, now_ns)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[ScheduledChunk]:
        """The next step: one row for everyone decoding, then prompt chunks in order of admission while the
        budget lasts.
        """
        budget = self.step_tokens_max
        ready = [sequence for sequence in self.running.values() if not sequence.is_pulling]
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
                assert count >= 1, "a prompt without anything left to compute"
                chunks.append(ScheduledChunk(sequence, sequence.computed, count, count == sequence.pending))
                budget -= count
        return chunks

    def commit(self, chunk: ScheduledChunk) -> None:
        """The rows of `chunk` are in the store: advance, and make blocks they filled reusable."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        sequence.has_chunk = True
        self.register(sequence)

    def pulled(self, sequence: Sequence) -> None:
        """All prompt rows of `sequence` are in the store."""
        sequence.is_pulling = False
        sequence.computed = len(sequence.request.prompt)
        self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        """Put the full computed blocks of `sequence` into the prefix table."""
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
        """Forget a sequence, waiting or running, and release its blocks unless they pass to somebody else.
        Idempotent.
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
        """Cached blocks this sequence can start from. Whoever prefills recomputes the last prompt token for
        its logits.
        """
        if not self.pool.prefix_reuse:
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
