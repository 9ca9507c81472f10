"""The engine's side of a prefill replica: running calls, their answers, and the handoffs that the engine holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.drain_rate import RETRY_MS_MAX, DrainRate, Stock
from kvmesh.replica.admission import FAILURE_CODES, too_late
from kvmesh.replica.calls import (
    cached_tokens,
    engine_call,
    first_token,
    invalid_token,
    microseconds,
    seed_call,
    valid_count,
)
from kvmesh.replica.engine_view import EngineView
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from kvmesh.triton.errors import (
    CallError,
    EngineBusy,
    EngineError,
    EngineLost,
    HandoffLost,
    NoHandoff,
)
from kvmesh.triton.port import CallKind, EngineLoad, EnginePort, FirstAnswer
from services.prefill.limits import PrefillLimits
from services.prefill.prefill_rate import PrefillRate
from services.prefill.records import CallRecord, Recorder
from services.prefill.slot import PrefillSlot, PrefillState
from services.prefill.slot_table import PrefillSlotTable

RUN_S: Final = 0.1
"""Assumed seconds of a prefill before the first measurement."""


class Prefilling:
    """An EngineSink. `connect` it to its engine before the first event."""

    engine: EnginePort

    def __init__(
        self,
        replica: str,
        tokens_per_block: int,
        limits: PrefillLimits,
        slot_table: PrefillSlotTable,
        heartbeat: LoadHeartbeat,
        record: Recorder,
        *,
        appends_end_token: bool = False,
    ) -> None:
        """`appends_end_token`: the engine omits the end token of an output that ends by itself."""
        self._appends_end_token = appends_end_token
        self._gives_handoffs = False
        """True once the engine gave a handoff."""
        self.assumed_end_total = 0
        """Calls without a handoff that were answered with the end token."""
        self.view = EngineView()
        self.is_ready = False
        self.calls: dict[int, PrefillSlot] = {}
        self.computed_token_total = 0
        self.cached_token_total = 0
        self.prefill_rate = PrefillRate()
        self._replica = replica
        self._tokens_per_block = tokens_per_block
        self._limits = limits
        self._slot_table = slot_table
        self._heartbeat = heartbeat
        self._record = record
        self._last_call_id = 0
        self._starts = DrainRate(Stock.QUEUE)

    @property
    def load(self) -> EngineLoad | None:
        """The engine's last own load report, of any age."""
        return self.view.last

    def start_queued(self, now_s: float) -> None:
        """Start engine calls while the queue's head fits; no slot overtakes the head. Then start calls of the lane.

        A slot that can no longer meet its deadline is refused.
        """
        self._start_fitting(now_s)
        self._starts.stock(len(self._slot_table.queue), now_s)
        while (slot := self._next_control()) is not None:
            if slot.submitted.start_by_s <= now_s:
                self.refuse_late(slot, now_s)
            else:
                self._slot_table.run_control(slot)
                self._call(slot, now_s)

    @property
    def running_count(self) -> int:
        """Engine calls of users."""
        return len(self.calls) - self._slot_table.lane.running_count

    def _start_fitting(self, now_s: float) -> None:
        queue = self._slot_table.queue
        while self.running_count < self._limits.engine_concurrency:
            slot = queue.head()
            if slot is None:
                return
            if slot.submitted.start_by_s <= now_s:
                self.refuse_late(slot, now_s)
            elif self._slot_table.can_run(slot):
                self._start(slot, now_s)
            else:
                return

    def _next_control(self) -> PrefillSlot | None:
        slot_table = self._slot_table
        if not slot_table.lane.has_turns():
            return None
        has_users = bool(len(slot_table.queue)) or self.running_count > 0
        return slot_table.lane.next(
            slot_table.blocks_free, has_users=has_users, is_short=slot_table.is_short()
        )

    def stall_s(self, slot: PrefillSlot) -> float:
        """Return the time at which an unanswered engine call ends `slot` (failure detector)."""
        return slot.called_s + self._limits.first_token_timeout_s + 2 * slot.submitted.estimate_s

    def forget(self, slot: PrefillSlot, now_s: float) -> None:
        """Cancel the engine call of `slot`, release its handoff, drop the slot; nothing is sent."""
        if slot.call_id:
            self.engine.cancel(slot.call_id)
            self._over(slot, now_s, "cancelled")
        if slot.context_phase_params:
            self.engine.release(slot.context_phase_params)
        self._slot_table.forget(slot)

    def fail(self, slot: PrefillSlot, error: CallError, now_s: float) -> None:
        """End `slot` after a failure of its engine call or of its handoff."""
        is_waiting = slot.state in (PrefillState.QUEUED, PrefillState.PENDING)
        untouched = is_waiting or isinstance(error, EngineBusy)
        if slot.session is not None:
            slot.session.outbox.fail(
                slot.number,
                FAILURE_CODES[type(error)],
                str(error),
                replica=self._replica,
                untouched=untouched,
            )
        self.forget(slot, now_s)

    def cut(self, slot: PrefillSlot, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """End `slot` with `reason`, behind its first token if that was sent."""
        if slot.session is not None:
            end = slot.submitted.start_position + (slot.state is PrefillState.HELD)
            slot.session.outbox.finish(slot.number, end, reason)
        self.forget(slot, now_s)

    def refuse_late(self, slot: PrefillSlot, now_s: float) -> None:
        """Refuse a queued slot that can no longer have its first token in time; no engine call was made."""
        if slot.session is not None:
            left_s, waited_s = slot.submitted.deadline_s - now_s, now_s - slot.submitted.submitted_s
            too_late("the prefill", slot.submitted.estimate_s, left_s, waited_s).send(
                slot.session.outbox, slot.number
            )
        self.forget(slot, now_s)

    def retry_after_ms(self, now_s: float) -> int:
        """Return the expected drain time of the queue as Retry-After in ms, within the bounds of DrainRate.

        Before a drain rate was measured, the estimate is the queue length times the seconds of a prefill.
        """
        waiting = len(self._slot_table.queue)
        guess_ms = 1000 * waiting * (self.prefill_rate.run_s or RUN_S) / self._limits.engine_concurrency
        return self._starts.retry_ms(waiting, now_s) or min(RETRY_MS_MAX, max(1, round(guess_ms)))

    # EngineSink.

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        """Keep the handoff of a computed prompt; the engine holds its KV blocks. A seed has pulled its blocks."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        slot.reused_blocks = first.reused_blocks
        if not slot.submitted.is_seed:
            slot.context_phase_params = first.context_phase_params
        elif slot.session is not None:
            slot.session.outbox.transfer(slot.number, microseconds(now_s - slot.called_s))

    def on_tokens(
        self,
        call_id: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        now_s: float,
        alternatives: bytes = b"",
    ) -> None:
        """Keep the first token. It is sent with the handoff when the call ends, which is in the same answer."""
        slot = self.calls.get(call_id)
        if slot is None or slot.token_id is not None or slot.submitted.is_seed:
            return
        if not valid_count(token_ids[:1], slot.submitted.vocabulary_size):
            self.fail(slot, invalid_token(token_ids[0], slot.submitted.vocabulary_size), now_s)
            self.start_queued(now_s)
            return
        slot.token_id = token_ids[0]
        slot.logprob = logprobs[0] if logprobs else None
        slot.alternatives = alternatives[: len(alternatives) // len(token_ids)]

    def on_end(self, call_id: int, now_s: float) -> None:
        """Send the first token and hold the handoff. An answer without a token ended with the end token, which TensorRT-LLM
        omits, or a guide."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        if slot.submitted.is_seed:
            self._end_seed(slot, now_s)
        elif slot.token_id is None:
            self._end_empty(slot, now_s)
        elif slot.context_phase_params:
            self._gives_handoffs = True
            self._tell_first(slot, now_s)
            self._slot_table.hold(slot, now_s + self._limits.handoff_timeout_s)
        elif slot.is_complete():
            self._tell_first(slot, now_s)
            self._slot_table.forget(slot)
        else:
            self.fail(slot, EngineError("the engine gave a first token without a handoff"), now_s)
        self.start_queued(now_s)

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        """Fail the slot of the call. TensorRT-LLM fails a call whose first token is its end token: no failure here."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        if isinstance(error, NoHandoff) and self._gives_handoffs and self._may_append_end_token(slot):
            self.assumed_end_total += 1
            self._end_empty(slot, now_s)
        else:
            self.fail(slot, error, now_s)
        self.start_queued(now_s)

    def on_step(self, now_s: float) -> None:
        """Nothing waits for the end of a step."""

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        """Keep the engine's load report. A new boot id means that every handoff is lost, and that pending seeds end."""
        known = self.view.last
        if not self.view.take(load, now_s):
            return
        self._heartbeat.touch()
        if known is not None and known.boot_id != load.boot_id:
            for slot in (*self._slot_table.held, *self._control(PrefillState.PENDING)):
                self.fail(slot, HandoffLost("the engine was started anew"), now_s)
            self.start_queued(now_s)

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        """Note whether the engine answers. Queued slots and pending seeds of a dead engine fail at once."""
        if is_ready == self.is_ready:
            return
        self.is_ready = is_ready
        self._heartbeat.touch()
        if not is_ready:
            error = EngineLost("the engine does not answer")
            while (slot := self._slot_table.queue.head()) is not None:
                self.fail(slot, error, now_s)
            for slot in self._control(PrefillState.QUEUED, PrefillState.PENDING):
                self.fail(slot, error, now_s)

    def assert_consistent(self) -> None:
        """Raise AssertionError if calls and slots disagree, or if the head of the queue or of the lane could run."""
        held = {slot.call_id: slot for slot in self._slot_table.slots.values() if slot.call_id}
        assert held == self.calls, (held, self.calls)
        assert self.running_count <= self._limits.engine_concurrency, self.calls
        head = self._slot_table.queue.head()
        if head is not None and self.running_count < self._limits.engine_concurrency:
            assert not self._slot_table.can_run(head), f"{head} waits for nothing"
        assert (control := self._next_control()) is None, f"{control} waits for nothing"

    def _start(self, slot: PrefillSlot, now_s: float) -> None:
        self._starts.freed(1, now_s)
        self._slot_table.run(slot)
        self._call(slot, now_s)

    def _call(self, slot: PrefillSlot, now_s: float) -> None:
        submit, session, handoff = slot.submit, slot.session, slot.handoff
        assert submit is not None and session is not None, slot
        slot.submit = slot.handoff = None  # the prompt is the engine's now
        slot.called_s = now_s
        self._last_call_id += 1
        slot.call_id = self._last_call_id
        self.calls[slot.call_id] = slot
        session.outbox.start(slot.number, microseconds(now_s - slot.submitted.submitted_s))
        self._slot_table.look_by(slot, self.stall_s(slot))
        left_s = slot.submitted.deadline_s - now_s
        call = engine_call(submit, CallKind.CONTEXT_ONLY, left_s)
        self.engine.start(slot.call_id, call if handoff is None else seed_call(submit, handoff, left_s))

    def _control(self, *states: PrefillState) -> list[PrefillSlot]:
        """Return the slots of the control plane in one of `states`."""
        return [slot for slot in self._slot_table.lane if slot.state in states]

    def _end_seed(self, slot: PrefillSlot, now_s: float) -> None:
        """Report that the blocks of a seed are in the cache."""
        self._over(slot, now_s, "seeded")
        if slot.session is not None:
            slot.session.outbox.finish(
                slot.number, slot.submitted.start_position + 1, pb.Finish.REASON_LENGTH
            )
        self._slot_table.forget(slot)

    def _may_append_end_token(self, slot: PrefillSlot) -> bool:
        """Return whether an empty answer is the end token, which the engine omits."""
        submitted = slot.submitted
        return self._appends_end_token and bool(submitted.end_token_ids) and not submitted.is_guided

    def _end_empty(self, slot: PrefillSlot, now_s: float) -> None:
        """End the slot of an answer without a token. Its end token is sent with an unknown log-probability."""
        if self._may_append_end_token(slot):
            slot.token_id = slot.submitted.end_token_ids[0]
            self._tell_first(slot, now_s)
            self._slot_table.forget(slot)
            return
        self._computed(slot, now_s)
        self._over(slot, now_s, "end_token")
        self.cut(slot, pb.Finish.REASON_END_TOKEN, now_s)

    def _computed(self, slot: PrefillSlot, now_s: float) -> int:
        """Count the computed prompt of `slot`, unless no user waits for it; return its cached tokens."""
        cached = self._cached_tokens(slot)
        if slot.submitted.purpose:
            return cached
        self.cached_token_total += cached
        self.computed_token_total += slot.submitted.prompt_tokens - cached
        self.prefill_rate.observe(slot.submitted.prompt_tokens, now_s - slot.called_s, now_s)
        return cached

    def _tell_first(self, slot: PrefillSlot, now_s: float) -> None:
        assert slot.session is not None and slot.token_id is not None, slot
        cached = self._computed(slot, now_s)
        self._over(slot, now_s, "first_token")
        slot.session.outbox.first_token(
            first_token(
                slot.number,
                slot.submitted.start_position,
                slot.token_id,
                slot.logprob,
                prompt_tokens=slot.submitted.prompt_tokens,
                cached=cached,
                run_s=now_s - slot.called_s,
                context_phase_params=slot.context_phase_params,
                alternatives=slot.alternatives,
            )
        )

    def _cached_tokens(self, slot: PrefillSlot) -> int:
        return cached_tokens(slot.reused_blocks, self._tokens_per_block, slot.submitted.prompt_tokens)

    def _over(self, slot: PrefillSlot, now_s: float, outcome: str) -> None:
        """Record the end of the slot's call. The caller sets the slot's state."""
        del self.calls[slot.call_id]
        slot.call_id = 0
        self._slot_table.lane.end(slot)
        self._heartbeat.touch()
        self._record(
            CallRecord(
                request_id=slot.submitted.request_id,
                attempt=slot.submitted.attempt,
                traceparent=slot.submitted.traceparent,
                submitted_s=slot.submitted.submitted_s,
                called_s=slot.called_s,
                ended_s=now_s,
                prompt_tokens=slot.submitted.prompt_tokens,
                cached_tokens=self._cached_tokens(slot),
                outcome=outcome,
                purpose=slot.submitted.purpose,
            )
        )
