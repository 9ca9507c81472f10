"""An engine that computes nothing: the first token of a request at once, then one per step. Pure.

Output token number n is `pacing.token_id_at(n)` for every prompt. Blocks of prompts and outputs are cached with LRU
eviction, and their KV events are those of an engine that computes. Sampling parameters are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bench.pacing import token_id_at
from engines.contract import errors
from engines.contract.errors import EngineError
from engines.contract.kv_events import BlocksRemoved, BlocksStored, KvCacheEvent
from engines.contract.outputs import LoadReport, PerfMetrics, RequestOutput
from engines.contract.request import EngineRequest, RequestKind
from kvmesh import blocks
from simulator.lru import BlockCache

HOLD_S: Final = 1.0
"""A handoff is dropped after this time: no decode engine pulls its blocks."""
KV_BLOCKS: Final = 60_000
LOG_PROB: Final = -0.5


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Size of the cache and of its blocks, with the salt of the block hashes."""

    kv_blocks: int = KV_BLOCKS
    block_tokens: int = 32
    salt: str = ""


@dataclass(slots=True)
class _Run:
    """A request that has more tokens to make.

    `hashes`, `blocks`: hashes and tokens of the full blocks. `tail`: the tokens behind them.
    """

    request: EngineRequest
    reserved: int
    made: int = 0
    hashes: list[int] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)
    tail: bytes = b""


class PacedEngine:
    """The requests of one engine, its cache and its handoffs. INVARIANT: a run has at least one token to make."""

    def __init__(self, boot_id: str, size: EngineSize, step_s: float) -> None:
        """`step_s`: the step time that the load report tells, in seconds."""
        self._boot_id = boot_id
        self._size = size
        self._step_s = step_s
        self._root = blocks.root_hash(size.salt)
        self._runs: dict[int, _Run] = {}
        self._cache = BlockCache(size.kv_blocks)
        self._held: dict[int, tuple[int | None, bytes]] = {}
        """Parent and tokens of the cached blocks, parents before children."""
        self._handoffs: dict[bytes, float] = {}
        """Time at which each held handoff is dropped."""
        self._events: list[KvCacheEvent] = []
        self._handoff_count = 0
        self._steps = 0
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._runs)

    def begin(self, request: EngineRequest, now_s: float) -> RequestOutput:
        """Take a request and return its first output. Raises EngineError for a handoff of this boot that is not held."""
        if request.kind is RequestKind.GENERATION_ONLY:
            self._pull(request.context_phase_params)
        reserved = blocks.count_for(len(request.prompt) + request.output_tokens_max, self._size.block_tokens)
        run = _Run(request, reserved)
        self._append(run, request.prompt.astype("<i4").tobytes())
        reused = self._cache.depth(run.hashes)
        self._store(run)
        output = self._next(run)
        output.perf = PerfMetrics(reserved, reused, 0, 0, 0, 0)
        if request.kind is RequestKind.CONTEXT_ONLY:
            self._handoff_count += 1
            output.handoff = f"{self._boot_id}/{self._handoff_count}".encode()
            self._handoffs[output.handoff] = now_s + HOLD_S
            output.is_final = output.is_complete = True
        if not output.is_final:
            self._runs[request.key] = run
        return output

    def step(self, now_s: float) -> list[tuple[int, RequestOutput]]:
        """Make one token for each run. Return the outputs by the keys of their requests."""
        while self._handoffs and next(iter(self._handoffs.values())) <= now_s:
            del self._handoffs[next(iter(self._handoffs))]
        self._steps += bool(self._runs)
        outputs = [(key, self._next(run)) for key, run in self._runs.items()]
        for key, output in outputs:
            if output.is_final:
                del self._runs[key]
        return outputs

    def cancel(self, key: int) -> bool:
        """End a run. Return whether there was one."""
        return self._runs.pop(key, None) is not None

    def keys_of(self, request_id: str) -> list[int]:
        """Return the keys of the runs with this Triton request id."""
        return [key for key, run in self._runs.items() if run.request.request_id == request_id]

    def release(self, handoff: bytes) -> None:
        """Drop a handoff; unknown ones are ignored."""
        self._handoffs.pop(handoff, None)

    def take_events(self) -> list[KvCacheEvent]:
        """Return the KV events since the last call."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[BlocksStored]:
        """Return the cached blocks, parents before children."""
        return [BlocksStored(parent, ((value, tokens),)) for value, (parent, tokens) in self._held.items()]

    def load(self) -> LoadReport:
        """Return the load report."""
        return LoadReport(
            boot_id=self._boot_id,
            blocks_total=self._size.kv_blocks,
            blocks_free=max(0, self._size.kv_blocks - sum(run.reserved for run in self._runs.values())),
            blocks_cached=len(self._cache),
            sequences_running=len(self._runs),
            sequences_waiting=0,
            handoffs_held=len(self._handoffs),
            handoff_blocks=0,
            prefill_tokens_computed_total=0,
            prefill_tokens_cached_total=0,
            steps_total=self._steps,
            step_s_ewma=self._step_s,
            tokens_generated_total=self._tokens,
        )

    def _pull(self, handoff: bytes) -> None:
        """Take over the blocks of a handoff. Those of another engine are taken on trust."""
        is_own = handoff.startswith(self._boot_id.encode())
        if is_own and self._handoffs.pop(handoff, None) is None:
            reason = errors.HANDOFF_UNKNOWN.format(handoff=handoff.decode(), peer=self._boot_id)
            raise EngineError(errors.EXECUTOR_FAILED.format(request=0, reason=reason))

    def _next(self, run: _Run) -> RequestOutput:
        token = token_id_at(run.made)
        run.made += 1
        self._tokens += 1
        self._append(run, token.to_bytes(4, "little"))
        if not run.tail:
            self._store(run)
        is_over = run.made >= run.request.output_tokens_max
        return RequestOutput([token], [LOG_PROB], is_final=is_over, is_complete=is_over)

    def _append(self, run: _Run, tokens: bytes) -> None:
        """Put `tokens` behind those of the run. They may fill blocks."""
        run.tail += tokens
        width = 4 * self._size.block_tokens
        while len(run.tail) >= width:
            block, run.tail = run.tail[:width], run.tail[width:]
            run.hashes.append(blocks.child_hash(run.hashes[-1] if run.hashes else self._root, block))
            run.blocks.append(block)

    def _store(self, run: _Run) -> None:
        """Cache the blocks of a run, those that were evicted before included."""
        added, removed = self._cache.use(run.hashes)
        if added:
            at = run.hashes.index(added[0])
            parent = run.hashes[at - 1] if at else None
            stored = tuple(zip(added, run.blocks[at:], strict=True))
            self._events.append(BlocksStored(parent, stored))
            for value, tokens in stored:
                self._held[value] = (parent, tokens)
                parent = value
        if removed:
            self._events.append(BlocksRemoved(tuple(removed)))
            for value in removed:
                del self._held[value]
