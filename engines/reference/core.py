"""The engine core, a state machine without threads, sockets or clock: commands and step results in, outputs out.

Owns the scheduler, the block pool, the handoff table and the counters. All methods run on the engine thread; time
is an argument. The caller (engine.py) runs the arithmetic between `plan` and `commit`. The caller also delivers
`outputs`, starts the KV transfers in `pulls_to_start` and aborts those in `pulls_to_abort`.
"""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from engines.contract import errors
from engines.contract.errors import BAD_VALUE, EngineError
from engines.contract.guide_text import GuideText
from engines.contract.outputs import LoadReport, PerfMetrics, RequestOutput
from engines.contract.request import RequestKind
from engines.reference.adjustments import adjusted, allow_only
from engines.reference.arithmetic import ChosenToken, ChunkInput, Logits
from engines.reference.block_pool import BlockPool, chain_hashes
from engines.reference.cold_shapes import ColdShapes, Shape, shapes_of
from engines.reference.config import EngineConfig
from engines.reference.cost_model import CostModel
from engines.reference.faults import NO_FAULTS, Faults
from engines.reference.handoff import Handoff, HandoffTable
from engines.reference.sampling import NO_TOKEN, sample_token, top_log_probabilities
from engines.reference.scheduler import ScheduledChunk, Scheduler
from engines.reference.sequence import Guide, ReferenceRequest, Sequence

INVALID_TOKEN_OFFSET = 1 << 24  # fault injection adds this to token ids; larger than any vocabulary


NO_TOKEN_LEFT: Final = BAD_VALUE.format(
    field="guided_decoding_guide",
    value="no token of the guide is left by min_tokens, stop tokens and embedding_bias",
    allowed="a guide that can be met",
)


@dataclass(frozen=True, slots=True)
class KvPull:
    """A KV transfer to start: blocks [first_block, first_block + len(block_ids)) of a handoff into `block_ids`."""

    key: int
    handoff: Handoff
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    steps: int = 0
    step_s_ewma: float = 0.0
    tokens_generated: int = 0


@dataclass(slots=True)
class EngineCore:
    """The state machine of one engine. `address` is the "host:port" that other engines dial for KV transfer."""

    config: EngineConfig
    boot_id: str
    digest: str
    address: str
    block_bytes: int
    handoffs: HandoffTable = field(default_factory=HandoffTable)
    counters: Counters = field(default_factory=Counters)
    outputs: list[tuple[int, RequestOutput]] = field(
        default_factory=list
    )  # (key, output), oldest first; the caller takes and clears them
    pulls_to_start: list[KvPull] = field(default_factory=list)  # the caller takes and clears them
    pulls_to_abort: list[int] = field(
        default_factory=list
    )  # keys of requests that ended during their pull; the caller takes and clears them
    scheduler: Scheduler = field(init=False)
    cold_shapes: ColdShapes = field(init=False)
    faults: Faults = NO_FAULTS  # changed by `set_faults` only
    compile_guide: Callable[[GuideText], Guide] | None = None  # None: no guided output
    _handoff_ids: int = 0

    def __post_init__(self) -> None:
        config = self.config
        pool = BlockPool(config.kv_blocks, config.block_tokens, config.salt.encode(), config.prefix_reuse)
        self.scheduler = Scheduler(pool, config.running_max, config.step_tokens_max, config.queue_max)
        self.cold_shapes = ColdShapes(config.cold_s, config.cold_runs)

    @property
    def pool(self) -> BlockPool:
        """The block pool of the scheduler."""
        return self.scheduler.pool

    def set_faults(self, faults: Faults) -> None:
        """Inject these faults from here on.

        A hang also stops requests in the engine. Errors are drawn for later requests. A request that hangs stays so.
        """
        if faults is self.faults:
            return
        self.faults, self.scheduler.misses_cache = faults, bool(faults.miss)
        for sequence in (*self.scheduler.running.values(), *self.scheduler.waiting):
            sequence.is_hung = sequence.is_hung or faults.hangs(sequence.request.request_id)

    def submit(self, request: ReferenceRequest) -> Sequence | None:
        """Queue a request and return its sequence.

        A rejected request gets a final output with the error, and None is returned.
        """
        hashes = chain_hashes(request.prompt, self.config.block_tokens, self.pool.root)
        sequence = Sequence(request, hashes)
        sequence.is_hung = self.faults.hangs(request.request_id)
        sequence.error_after = self.faults.error_after(request.request_id, request.output_tokens_max)
        try:
            self._check_handoff(request, hashes)
            self.scheduler.enqueue(sequence)
        except EngineError as error:
            self._fail(request.key, str(error))
            return None
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a request after its client has cancelled, and free its blocks. The last output is empty and final."""
        if self._remove(sequence):
            self.outputs.append((sequence.request.key, RequestOutput(is_final=True)))

    def fail(self, sequence: Sequence, text: str) -> None:
        """End a request with an error and free its blocks."""
        if self._remove(sequence):
            self._fail(sequence.request.key, text)

    def release_handoff(self, handoff: Handoff) -> None:
        """Release a handoff of this boot of the engine. Handoffs of other boots are ignored: their blocks are gone."""
        if handoff.boot_id == self.boot_id:
            self._free(self.handoffs.release(handoff.handoff_id))

    def release_handoffs_of(self, request_id: str) -> None:
        """Release the handoffs that requests with this Triton id have made."""
        for block_ids in self.handoffs.release_of_request(request_id):
            self._free(block_ids)

    def handoff_sent(self, handoff_id: int, *, is_acknowledged: bool) -> None:
        """Record that the KV listener has ended a send; free the blocks if the handoff is over."""
        self._free(self.handoffs.end_send(handoff_id, is_acknowledged=is_acknowledged))

    def expire(self, now_s: float) -> None:
        """Free the blocks of held handoffs that have expired."""
        for block_ids in self.handoffs.expire(now_s):
            self._free(block_ids)

    def pulled(self, sequence: Sequence, now_ns: int) -> None:
        """Continue `sequence` after its KV transfer: the missing blocks are in the store.

        The first token of the handoff is emitted; the next step decodes.
        """
        if sequence.request.key not in self.scheduler.running or sequence.is_hung:
            return
        handoff = sequence.request.handoff
        assert handoff is not None
        self.counters.prefill_tokens_cached += len(sequence.request.prompt)
        self.scheduler.pulled(sequence)
        for token, log_probability in zip(handoff.first_tokens, handoff.first_log_probs, strict=True):
            is_last = sequence.append(token) or self._is_guide_over(sequence)
            output = self._emit(sequence, token, log_probability, is_last, now_ns)
            if count := sequence.request.sampling.top_log_probs:
                # Those of this token left with the prefill's answer. A row keeps the later ones at their tokens.
                output.top_ids, output.top_log_probs = [[NO_TOKEN] * count], [[0.0] * count]
            if is_last:
                self.scheduler.remove(sequence)
                return

    def pull_failed(self, sequence: Sequence, reason: str) -> None:
        """End `sequence` with an error because its KV transfer failed."""
        self.fail(sequence, errors.EXECUTOR_FAILED.format(request=sequence.request.request_id, reason=reason))

    def plan(self, now_ns: int) -> list[ScheduledChunk]:
        """Admit the waiting sequences that fit and return the chunks of the next step; may be empty."""
        for sequence in self.scheduler.admit(now_ns):
            if sequence.request.kind is RequestKind.GENERATION_ONLY:
                self._start_pull(sequence)
            else:
                self.counters.prefill_tokens_cached += sequence.computed
        return self.scheduler.plan()

    def chunk_inputs(self, plan: list[ScheduledChunk]) -> list[ChunkInput]:
        """Return the input of the arithmetic for a plan.

        Block ids are copies because `register` may replace block ids of a sequence afterwards.
        """
        width = self.config.block_tokens
        return [
            ChunkInput(
                tokens=chunk.sequence.tokens[chunk.start : chunk.start + chunk.count],
                start=chunk.start,
                block_ids=chunk.sequence.block_ids[: -(-(chunk.start + chunk.count) // width)].copy(),
                wants_logits=chunk.wants_logits,
                is_greedy=chunk.sequence.takes_most_likely,
            )
            for chunk in plan
        ]

    def cost_s(self, plan: list[ScheduledChunk], costs: CostModel) -> float:
        """Return the simulated duration of this step in seconds, longer by `cold_s` if one of its shapes is cold."""
        warm_s = costs.step_total_s(
            costs.chunk_s(chunk.start, chunk.count, is_first=not chunk.sequence.has_chunk)
            for chunk in plan
            if chunk.is_prefill
        )
        return warm_s + self.cold_shapes.extra_s(_shapes(plan))

    def commit(
        self,
        plan: list[ScheduledChunk],
        logits: List[Logits | ChosenToken | None],
        now_ns: int,
        step_s: float,
    ) -> None:
        """Apply a computed step: register full blocks, sample tokens, end finished sequences."""
        counters = self.counters
        counters.steps += 1
        self.cold_shapes.record(_shapes(plan))
        counters.step_s_ewma += (step_s - counters.step_s_ewma) * (1.0 if counters.steps == 1 else 0.1)
        for chunk, row in zip(plan, logits, strict=True):
            if chunk.is_prefill:
                counters.prefill_tokens_computed += chunk.count
            self.scheduler.commit(chunk)
            if row is not None:
                self._sample(chunk.sequence, row, now_ns)

    def load(self) -> LoadReport:
        """Return the current load."""
        handoffs, handoff_blocks = self.handoffs.held()
        counters = self.counters
        return LoadReport(
            boot_id=self.boot_id,
            blocks_total=self.pool.block_count,
            blocks_free=self.pool.available,
            blocks_cached=self.pool.cached,
            sequences_running=len(self.scheduler.running),
            sequences_waiting=len(self.scheduler.waiting),
            handoffs_held=handoffs,
            handoff_blocks=handoff_blocks,
            prefill_tokens_computed_total=counters.prefill_tokens_computed,
            prefill_tokens_cached_total=counters.prefill_tokens_cached,
            steps_total=counters.steps,
            step_s_ewma=counters.step_s_ewma,
            tokens_generated_total=counters.tokens_generated,
            cold_steps_total=self.cold_shapes.steps_total,
        )

    def _sample(self, sequence: Sequence, row: Logits | ChosenToken, now_ns: int) -> None:
        if self.config.lie == "refuse" and sequence.generated >= self.config.lie_after:
            text = errors.BAD_VALUE.format(field="input_ids", value="a lie", allowed="none")
            self.fail(sequence, text)
            return
        if sequence.error_after is not None and sequence.generated >= sequence.error_after:
            self.fail(sequence, errors.ENGINE_FAULT.format(reason="injected"))
            return
        sampling = sequence.request.sampling
        try:
            guide = self._guide_of(sequence)
            if guide is not None and guide.is_over:  # a resumed request whose output was complete
                self.outputs.append((sequence.request.key, RequestOutput(is_final=True, is_complete=True)))
                self.scheduler.remove(sequence)
                return
            if isinstance(row, ChosenToken):
                token, log_probability = row.token, row.log_probability if sampling.log_probs else 0.0
            else:
                changed = self._adjusted(sequence, row, guide)
                token, log_probability = sample_token(row, sequence.length, sampling, changed)
        except EngineError as error:
            self.fail(sequence, str(error))
            return
        if not isinstance(row, ChosenToken):
            token = self._made_wrong(sequence, token, len(row))
        self.counters.tokens_generated += 1
        is_context = sequence.request.kind is RequestKind.CONTEXT_ONLY
        is_last = sequence.append(token) or self._is_guide_over(sequence) or is_context
        output = self._emit(sequence, token, log_probability, is_last, now_ns)
        if sampling.top_log_probs and not isinstance(row, ChosenToken):
            ids, values = top_log_probabilities(row, sampling.top_log_probs)
            output.top_ids, output.top_log_probs = [ids], [values]
        is_hidden = self.config.hide_end_token and token in sequence.request.end_ids
        if is_hidden:
            output.tokens.clear()
            output.log_probs.clear()
            output.top_ids.clear()
            output.top_log_probs.clear()
        if is_context and not is_hidden:
            output.handoff = self._create_handoff(sequence, token, log_probability, now_ns).encode()
            self.scheduler.remove(sequence, keep_blocks=True)
        elif is_last:
            self.scheduler.remove(sequence)

    def _made_wrong(self, sequence: Sequence, token: int, vocabulary: int) -> int:
        """Return the token that injected faults emit in place of `token`: mostly itself."""
        if self.faults.wrong:
            token = self.faults.emitted(token, sequence.tokens[: sequence.length], vocabulary)
        if self.faults.flip:
            token = self.faults.flipped(token, self.boot_id, self.counters.tokens_generated, vocabulary)
        return token

    def _is_guide_over(self, sequence: Sequence) -> bool:
        """True if the guide of a sequence allows nothing behind its output, or cannot go on."""
        try:
            guide = self._guide_of(sequence)
            return guide is not None and guide.is_over
        except EngineError:
            return False  # the next token reports it

    def _adjusted(self, sequence: Sequence, row: Logits, guide: Guide | None) -> Logits | None:
        """Return the logits from which the next token is drawn. None: the row itself. Raises EngineError."""
        request = sequence.request
        if guide is None and request.adjustments.change_nothing:
            return None
        tokens, start = sequence.tokens[: sequence.length], sequence.output_start
        changed = adjusted(row, request.adjustments, tokens, start, sequence.generated, request.end_ids)
        if guide is None:
            return changed
        left = allow_only(changed, guide.allowed())
        if not np.isfinite(left).any():
            raise EngineError(NO_TOKEN_LEFT)
        return left

    def _guide_of(self, sequence: Sequence) -> Guide | None:
        """Return the guide of a sequence after all its output, or None. Raises EngineError."""
        if sequence.request.guide is None:
            return None
        if sequence.guide is None:
            # Compiled before the request came here: it may take long, and every sequence would wait for it.
            compiled = sequence.request.compiled_guide
            if compiled is None:
                assert self.compile_guide is not None, "a request with a guide was checked"
                compiled = self.compile_guide(sequence.request.guide)
            sequence.guide, sequence.guided = compiled, sequence.output_start
        for token in sequence.tokens[sequence.guided : sequence.length].tolist():
            sequence.guide.consume(token)
            sequence.guided += 1
        return sequence.guide

    def _emit(
        self, sequence: Sequence, token: int, log_probability: float, is_last: bool, now_ns: int
    ) -> RequestOutput:
        if self.config.lie == "tokens" and sequence.generated > self.config.lie_after:
            token += INVALID_TOKEN_OFFSET
        output = RequestOutput([token], [log_probability], is_final=is_last, is_complete=is_last)
        if not sequence.has_output:
            sequence.has_output = True
            arrival_ns = sequence.request.arrival_ns
            blocks = len(sequence.block_ids)
            output.perf = PerfMetrics(
                blocks, sequence.reused_blocks, arrival_ns, sequence.first_scheduled_ns, now_ns, now_ns
            )
        self.outputs.append((sequence.request.key, output))
        return output

    def _create_handoff(self, sequence: Sequence, token: int, log_probability: float, now_ns: int) -> Handoff:
        self._handoff_ids += 1
        expires_s = now_ns * 1e-9 + self.config.handoff_timeout_s
        request = sequence.request
        self.handoffs.hold(self._handoff_ids, sequence.block_ids.tolist(), expires_s, request.request_id)
        prompt = request.prompt
        return Handoff(
            boot_id=self.boot_id,
            handoff_id=self._handoff_ids,
            address=self.address,
            first_tokens=[token],
            first_log_probs=[log_probability],
            token_count=len(prompt),
            block_tokens=self.config.block_tokens,
            block_hashes=sequence.prompt_hashes,
            tail_hash=self._tail_hash(prompt, sequence.prompt_hashes),
            block_bytes=self.block_bytes,
            digest=self.digest,
        )

    def _tail_hash(self, prompt: npt.NDArray[np.int32], hashes: list[int]) -> int:
        tail = prompt[len(hashes) * self.config.block_tokens :].astype("<i4", copy=False).tobytes()
        return xxhash.xxh3_64_intdigest(tail, seed=hashes[-1] if hashes else self.pool.root)

    def _check_handoff(self, request: ReferenceRequest, hashes: list[int]) -> None:
        """Raise EngineError if the handoff of a generation_only request cannot be continued here.

        A handoff is rejected if its address is not the request's `kv_peer`, or if digest, block size or prompt differ.
        """
        handoff = request.handoff
        if request.kind is not RequestKind.GENERATION_ONLY:
            return
        if handoff is None:
            raise EngineError(errors.CONTEXT_PARAMS_MISSING)
        if request.kv_peer is not None and request.kv_peer != handoff.address:
            text = errors.SOURCE_NOT_REGISTERED.format(named=handoff.address, registered=request.kv_peer)
            raise EngineError(text)
        reason = None
        if handoff.digest != self.digest:
            reason = f"arithmetic is {handoff.digest}, this engine has {self.digest}"
        elif (handoff.block_tokens, handoff.block_bytes) != (self.config.block_tokens, self.block_bytes):
            reason = f"blocks of {handoff.block_tokens} tokens, {handoff.block_bytes} bytes"
            reason += f"; here {self.config.block_tokens} tokens, {self.block_bytes} bytes"
        elif handoff.token_count != len(request.prompt):
            reason = f"made for {handoff.token_count} prompt tokens, got {len(request.prompt)}"
        elif handoff.block_hashes != hashes or handoff.tail_hash != self._tail_hash(request.prompt, hashes):
            reason = "made for another prompt"
        if reason is not None:
            raise EngineError(errors.HANDOFF_MISMATCH.format(reason=reason))

    def _start_pull(self, sequence: Sequence) -> None:
        handoff = sequence.request.handoff
        assert handoff is not None
        prompt_blocks = -(-len(sequence.request.prompt) // self.config.block_tokens)
        first = sequence.reused_blocks
        ids = tuple(sequence.block_ids[first:prompt_blocks].tolist())
        self.pulls_to_start.append(KvPull(sequence.request.key, handoff, first, ids))

    def _remove(self, sequence: Sequence) -> bool:
        key = sequence.request.key
        is_known = key in self.scheduler.running or sequence in self.scheduler.waiting
        if sequence.is_pulling and is_known:
            self.pulls_to_abort.append(key)
        self.scheduler.remove(sequence)
        return is_known

    def _fail(self, key: int, text: str) -> None:
        self.outputs.append((key, RequestOutput(error=text, is_final=True)))

    def _free(self, block_ids: list[int] | None) -> None:
        if block_ids is not None:
            self.pool.release(block_ids)


def _shapes(plan: list[ScheduledChunk]) -> tuple[Shape, ...]:
    prefill_tokens = sum(chunk.count for chunk in plan if chunk.is_prefill)
    return shapes_of(prefill_tokens, sum(chunk.count for chunk in plan if not chunk.is_prefill))
