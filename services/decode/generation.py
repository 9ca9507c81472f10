"""The engine's side of a decode replica: starts engine calls, batches their tokens by step, reports their end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.replica.admission import FAILURE_CODES
from kvmesh.replica.calls import (
    cached_tokens,
    engine_call,
    first_token,
    invalid_token,
    microseconds,
    valid_count,
)
from kvmesh.replica.engine_view import EngineView
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from kvmesh.triton.errors import (
    CallError,
    EngineError,
    EngineLost,
)
from kvmesh.triton.port import CallKind, EngineLoad, EnginePort, FirstAnswer
from services.decode.handoff_trial import TRIAL_S, HandoffTrial
from services.decode.limits import DecodeLimits
from services.decode.records import CallRecord, Recorder
from services.decode.slot import DecodeSlot, DecodeState
from services.decode.slot_table import DecodeSlotTable
from services.decode.step_batch import StepBatch

COMPUTED_STRIDE: Final = 32
"""The reader gets the computed position after this many more tokens beyond its window: half a flow-control window."""

_CANCELLED: Final = "cancelled"


class Generation:
    """An EngineSink. `connect` it to its engine before the first event."""

    engine: EnginePort

    def __init__(
        self,
        replica: str,
        tokens_per_block: int,
        limits: DecodeLimits,
        slot_table: DecodeSlotTable,
        heartbeat: LoadHeartbeat,
        record: Recorder,
        *,
        trial: HandoffTrial,
        appends_end_token: bool = False,
    ) -> None:
        """`appends_end_token`: the engine omits the end token of an output that ends by itself."""
        self.trial = trial
        self._appends_end_token = appends_end_token
        self.step_batch: StepBatch[DecodeSlot] = StepBatch(limits.coalesce_max_s)
        self.view = EngineView()
        self.is_ready = False
        self.calls: dict[int, DecodeSlot] = {}
        self.token_total = 0
        self.flush_total = 0
        self._replica = replica
        self._tokens_per_block = tokens_per_block
        self._limits = limits
        self._slot_table = slot_table
        self._heartbeat = heartbeat
        self._record = record
        self._last_call_id = 0

    @property
    def load(self) -> EngineLoad | None:
        """The engine's last own load report, of any age."""
        return self.view.last

    def start(self, slot: DecodeSlot, now_s: float, handoff: pb.Handoff | None = None) -> None:
        """Start the engine call of a waiting slot, and report the start to its caller."""
        submit = slot.submit
        assert submit is not None and slot.is_waiting(), slot
        assert slot.session is not None, slot
        slot.submit = slot.handoff = None  # the prompt is the engine's now
        slot.state = DecodeState.RUNNING
        slot.called_s = slot.heard_s = now_s
        self._last_call_id += 1
        slot.call_id = self._last_call_id
        self.calls[slot.call_id] = slot
        slot.session.outbox.start(slot.number, microseconds(now_s - slot.submitted.submitted_s))
        self._slot_table.look_by(slot, self.stall_s(slot))
        self._heartbeat.touch()
        kind = CallKind.CONTEXT_AND_GENERATION if handoff is None else CallKind.GENERATION_ONLY
        self.engine.start(slot.call_id, engine_call(submit, kind, slot.submitted.deadline_s - now_s, handoff))

    def start_control(self, now_s: float) -> None:
        """Start the calls of the control plane whose turn has come."""
        while (slot := self._next_control()) is not None:
            self._slot_table.start_control(slot)
            self.start(slot, now_s, slot.handoff)

    @property
    def running_count(self) -> int:
        """Engine calls of users."""
        return len(self.calls) - self._slot_table.lane.running_count

    def _next_control(self) -> DecodeSlot | None:
        slot_table = self._slot_table
        if not slot_table.lane.has_turns():
            return None
        free, has_users = slot_table.reservations.free, slot_table.user_count() > 0
        # No user's slot waits for blocks: without room it is refused.
        return slot_table.lane.next(free, has_users=has_users, is_short=False)

    def stop(self, slot: DecodeSlot, now_s: float) -> None:
        """End the slot's call early, if there is one."""
        if slot.call_id:
            self.engine.cancel(slot.call_id)
            self._over(slot, now_s, _CANCELLED)

    def stall_s(self, slot: DecodeSlot) -> float:
        """Return the time at which an unanswered engine call ends `slot` (failure detector)."""
        limits = self._limits
        if slot.answered_s is not None:
            return slot.heard_s + limits.token_timeout_s
        if self.trial.is_of(slot):
            return slot.heard_s + min(TRIAL_S, limits.first_token_timeout_s)
        return slot.heard_s + limits.first_token_timeout_s

    def forget(self, slot: DecodeSlot, now_s: float) -> None:
        """End the slot's call and drop the slot; nothing is sent."""
        self.stop(slot, now_s)
        self.trial.end(slot)
        self._slot_table.forget(slot, now_s)

    def fail(self, slot: DecodeSlot, error: CallError, now_s: float) -> None:
        """End `slot` after a failure of its engine call or handoff; the tokens computed before are sent."""
        untouched = slot.submitted.is_local and slot.log.end == slot.log.start
        is_handoff = bool(slot.call_id) and not slot.submitted.is_local and slot.answered_s is None
        if is_handoff and self.trial.on_failed(slot, error, now_s):
            self._heartbeat.touch()
        if slot.call_id:
            self.engine.cancel(slot.call_id)
            self._over(slot, now_s, type(error).__name__)
        self.trial.end(slot)
        self.send(slot, now_s)
        self._tell_computed(slot)
        if slot.session is not None:
            slot.session.outbox.fail(
                slot.number,
                FAILURE_CODES[type(error)],
                str(error),
                replica=self._replica,
                untouched=untouched,
            )
        self._slot_table.forget(slot, now_s)

    def cut(self, slot: DecodeSlot, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """End `slot` with `reason` and the tokens that its flow-control window allows."""
        self.send(slot, now_s)
        self._tell_computed(slot)
        if slot.session is not None:
            slot.session.outbox.finish(slot.number, slot.log.sent, reason)
        self.forget(slot, now_s)

    def send(self, slot: DecodeSlot, now_s: float) -> None:
        """Move sendable tokens of `slot` into its session's outbox; finish the slot after its last token."""
        session, log = slot.session, slot.log
        if session is None:
            return
        if slot.first is not None and log.credit > log.start:
            session.outbox.first_token(slot.first)
            slot.first = None
            log.sent = log.start + 1
        chunk = log.take() if slot.first is None else None
        if chunk is not None:
            session.outbox.tokens(slot.number, *chunk)
        if slot.state is DecodeState.ENDED and log.is_drained():
            session.outbox.finish(slot.number, log.end, slot.ending)
            self._slot_table.finish(slot, now_s + self._limits.detached_s)
        elif not log.is_blocked():
            slot.blocked_s = None
        else:
            if slot.state is DecodeState.ENDED or log.end - slot.computed_told >= COMPUTED_STRIDE:
                self._tell_computed(slot)
            if slot.blocked_s is None:
                slot.blocked_s = now_s
                self._slot_table.look_by(slot, now_s + self._limits.slow_reader_s)

    def _tell_computed(self, slot: DecodeSlot) -> None:
        """Send the computed position of `slot` to its reader, if it exceeds the sent position."""
        log = slot.log
        if slot.session is not None and log.end > max(log.sent, slot.computed_told):
            slot.computed_told = log.end
            slot.session.outbox.computed(slot.number, log.end)

    def flush(self, now_s: float) -> None:
        """Flush the step batch: send the tokens of its slots."""
        self.flush_total += 1
        for slot in self.step_batch.take():
            self.send(slot, now_s)

    # EngineSink.

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        """Note the first answer: the KV transfer or the local prefill is complete."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        slot.answered_s = slot.heard_s = now_s
        slot.reused_blocks = first.reused_blocks
        self._slot_table.look_by(slot, self.stall_s(slot))
        if self.trial.on_pulled(slot):
            self._heartbeat.touch()
        if not slot.submitted.is_local and slot.session is not None:
            slot.session.outbox.transfer(slot.number, microseconds(now_s - slot.called_s))

    def on_tokens(
        self,
        call_id: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        now_s: float,
        alternatives: bytes = b"",
    ) -> None:
        """Append tokens to the slot's log; send at once or with the step frame."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        step_batch, log = self.step_batch, slot.log
        if step_batch.starts_step(slot):
            self.flush(now_s)
        is_first = log.end == log.start
        valid = valid_count(token_ids, slot.submitted.vocabulary_size)
        if valid < len(token_ids):
            log.append(token_ids[:valid], logprobs[:valid], alternatives)
            self.fail(slot, invalid_token(token_ids[valid], slot.submitted.vocabulary_size), now_s)
            self.start_control(now_s)
            return
        log.append(token_ids, logprobs, alternatives)
        slot.heard_s = now_s
        if not slot.submitted.purpose:
            self.token_total += len(token_ids)
        if log.end - log.start > slot.submitted.max_output_tokens:
            self.fail(
                slot,
                EngineError(f"the engine made more than {slot.submitted.max_output_tokens} tokens"),
                now_s,
            )
            self.start_control(now_s)
        elif is_first:
            step_batch.join(slot)
            if slot.has_first_row and slot.session is not None:
                beside = alternatives[: len(alternatives) // len(token_ids)]
                slot.first = self._first_row(slot, token_ids[0], logprobs, beside, now_s)
            self.send(slot, now_s)
        else:
            step_batch.report(slot, now_s, len(token_ids), is_measured=not slot.submitted.purpose)
            if step_batch.is_complete():
                self.flush(now_s)

    def on_end(self, call_id: int, now_s: float) -> None:
        """Free the KV blocks of an ended call; the finish row follows the last token."""
        slot = self.calls.get(call_id)
        if slot is None:
            return
        made = slot.log.end - slot.log.start
        if made < slot.handed_tokens:
            text = f"the engine repeated {made} of {slot.handed_tokens} tokens of its handoff"
            self.fail(slot, EngineError(text), now_s)
            self.start_control(now_s)
            return
        if self._lacks_end_token(slot):
            self._append_end_token(slot, now_s)
            made += 1
        if made == slot.submitted.max_output_tokens:
            slot.ending, outcome = pb.Finish.REASON_LENGTH, "length"
        else:  # a guided output may lack the end token, so the last token does not tell the reason
            slot.ending, outcome = pb.Finish.REASON_END_TOKEN, "end_token"
        self._over(slot, now_s, outcome)
        slot.state = DecodeState.ENDED
        self._slot_table.release(slot, now_s)
        self.send(slot, now_s)
        if self.step_batch.is_complete():
            self.flush(now_s)
        self.start_control(now_s)

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        """Fail the slot of the call."""
        slot = self.calls.get(call_id)
        if slot is not None:
            self.fail(slot, error, now_s)
            self.start_control(now_s)

    def on_step(self, now_s: float) -> None:
        """Send the step without a wait for slots that are not in it."""
        if self.step_batch.due_s() is not None:
            self.flush(now_s)

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        """Keep the engine's report for the routers."""
        if self.view.take(load, now_s):
            self._heartbeat.touch()

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        """Note whether the engine answers. Slots of the control plane that wait for a dead engine fail at once."""
        if is_ready == self.is_ready:
            return
        self.is_ready = is_ready
        self._heartbeat.touch()
        if not is_ready:
            self.trial.on_engine_lost()
            for slot in [slot for slot in self._slot_table.lane if slot.is_waiting()]:
                self.fail(slot, EngineLost("the engine does not answer"), now_s)

    def step_us(self) -> int:
        """Return the smoothed microseconds of a step: measured here, else the engine's own. 0: unknown."""
        return microseconds(self.step_batch.step_s or (self.load.step_s if self.load else 0.0))

    def fresh_step_s(self, now_s: float) -> float:
        """Return the present seconds of a step: measured here, else reported by the engine. 0: unknown."""
        return self.step_batch.fresh_step_s(now_s) or self.view.step_s(now_s)

    def assert_consistent(self) -> None:
        """Raise AssertionError if calls and slots disagree, or if the head of the control plane's lane could run."""
        held = {slot.call_id: slot for slot in self._slot_table.slots.values() if slot.call_id}
        assert held == self.calls, (held, self.calls)
        assert self.step_batch.live_count <= len(self.calls), self.calls
        assert (control := self._next_control()) is None, f"{control} waits for nothing"
        for slot in self.calls.values():
            limits = (slot.log.end - slot.log.start, slot.submitted.max_output_tokens)
            assert limits[0] <= limits[1], slot

    def _lacks_end_token(self, slot: DecodeSlot) -> bool:
        """Return whether an ended output lacks its end token."""
        submitted, log = slot.submitted, slot.log
        return (
            self._appends_end_token
            and bool(submitted.end_token_ids)
            and not submitted.is_guided
            and log.end - log.start < submitted.max_output_tokens
            and log.last_id not in submitted.end_token_ids
        )

    def _append_end_token(self, slot: DecodeSlot, now_s: float) -> None:
        """Append the end token that the engine omits. Its log-probability is unknown."""
        token_id, log = slot.submitted.end_token_ids[0], slot.log
        is_first = log.end == log.start
        log.append((token_id,))
        if not slot.submitted.purpose:
            self.token_total += 1
        if is_first and slot.has_first_row and slot.session is not None:
            slot.first = self._first_row(slot, token_id, (), b"", now_s)

    def _over(self, slot: DecodeSlot, now_s: float, outcome: str) -> None:
        """Record the end of the slot's call. The caller sets the slot's state."""
        del self.calls[slot.call_id]
        slot.call_id = 0
        self.trial.end(slot)
        self._slot_table.lane.end(slot)
        self.step_batch.leave(slot)
        self._heartbeat.touch()
        self._record(
            CallRecord(
                request_id=slot.submitted.request_id,
                attempt=slot.submitted.attempt,
                traceparent=slot.submitted.traceparent,
                is_local=slot.submitted.is_local,
                called_s=slot.called_s,
                answered_s=slot.answered_s,
                ended_s=now_s,
                tokens=slot.log.end - slot.log.start,
                reused_blocks=slot.reused_blocks,
                outcome=outcome,
                purpose=slot.submitted.purpose,
            )
        )

    def _first_row(
        self,
        slot: DecodeSlot,
        token_id: int,
        logprobs: Sequence[float],
        alternatives: bytes,
        now_s: float,
    ) -> pb.FirstToken:
        return first_token(
            slot.number,
            slot.log.start,
            token_id,
            logprobs[0] if logprobs else None,
            prompt_tokens=slot.submitted.prompt_tokens,
            cached=cached_tokens(slot.reused_blocks, self._tokens_per_block, slot.submitted.prompt_tokens),
            run_s=now_s - slot.called_s,
            alternatives=alternatives,
        )
