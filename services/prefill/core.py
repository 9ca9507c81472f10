"""Decisions of a prefill replica: admission control, deadlines, cancellation, ownership of handoffs. Pure.

Events come in through sessions (callers), `prefilling` (the engine's sink) and `on_timer`. Effects leave through the
sessions' outboxes and the EnginePort. The shell calls `next_wake_s` after every event.
"""

from __future__ import annotations

from typing import Final

from kvmesh import deadlines
from kvmesh.attach import frames
from kvmesh.attach.caller_session import AttachedCore, CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.refusal import SubmitRefusal, superseded
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.blocks import count_for
from kvmesh.replica.admission import check_submit, not_serving, quarantined, too_late
from kvmesh.replica.calls import control_purpose
from kvmesh.replica.life_view import IN_SERVICE, LifeView
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import EngineStalled, HandoffLost
from kvmesh.triton.port import EnginePort
from services.prefill.limits import PrefillLimits
from services.prefill.prefilling import Prefilling
from services.prefill.records import Recorder, discard_record
from services.prefill.seeding import IsSource, Seeding, check_purpose, seed_blocks
from services.prefill.slot import PRIORITY_CLASS_DEFAULT, PrefillSlot, PrefillState, PrefillSubmission
from services.prefill.slot_table import PrefillSlotTable

DRAIN_LOOK_S: Final = 0.0
"""Any time in the past: a drain checks the slots of the control plane at once."""


class PrefillCore(AttachedCore[PrefillSlot]):
    """See the module's docstring. Call `connect` before the first event."""

    def __init__(
        self,
        replica: str,
        facts: ModelFacts,
        limits: PrefillLimits,
        record: Recorder = discard_record,
        *,
        is_source: IsSource = lambda *_: False,
    ) -> None:
        """`record`: called for each ended engine call. `is_source(address, now_s)`: True if a seed may pull KV blocks from
        the address; by default from none."""
        self.replica = replica
        self.facts = facts
        self.limits = limits
        self.is_draining = False
        self.is_cordoned = False
        """True while the control plane keeps the replica out of use. Routers leave it alone; submits are still taken."""
        self.life = IN_SERVICE
        """The replica's life: a held replica gets nothing new from routers, a quarantined one refuses users."""
        self._heartbeat = LoadHeartbeat()
        self.slot_table = PrefillSlotTable(facts.kv_blocks, limits, self._heartbeat)
        self.prefilling = Prefilling(
            replica,
            facts.tokens_per_block,
            limits,
            self.slot_table,
            self._heartbeat,
            record,
            appends_end_token=not facts.capabilities.end_token,
        )
        self.seeding = Seeding(is_source, self.slot_table, self.prefilling, limits.handoff_timeout_s)
        self._phases: tuple[pb.Phase.ValueType, ...] = (pb.PHASE_CONTEXT_ONLY,)
        if facts.capabilities.disaggregated:
            self._phases += (pb.PHASE_SEED,)

    def __repr__(self) -> str:
        return f"PrefillCore({self.replica}, {list(self.slot_table.slots.values())})"

    @property
    def sink(self) -> Prefilling:
        """The receiver of the engine's events."""
        return self.prefilling

    def connect(self, engine: EnginePort) -> None:
        """Set the engine; called once."""
        self.prefilling.engine = engine

    def open_session(
        self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float
    ) -> CallerSession[PrefillSlot]:
        """See kvmesh.attach.server.Attachable."""
        session = CallerSession[PrefillSlot](self, peer.process_id, outbox)
        self.slot_table.sessions.append(session)
        self._heartbeat.has_listener = True
        outbox.load(self.load_report(now_s))
        return session

    def close_session(self, session: CallerSession[PrefillSlot], now_s: float) -> None:
        """Handle the loss of a stream: queued and running slots end; handoffs stay held, a decode may be pulling them."""
        self.slot_table.sessions.remove(session)
        self._heartbeat.has_listener = bool(self.slot_table.sessions)
        for slot in list(session.slots.values()):
            if slot.state is PrefillState.HELD:
                self.slot_table.detach(slot)
                self.slot_table.expire_at(slot, now_s + self.limits.detached_s)
            else:
                self.prefilling.forget(slot, now_s)
        self.prefilling.start_queued(now_s)

    def adopt(self, session: CallerSession[PrefillSlot], adopt: pb.Adopt, now_s: float) -> None:
        """Refuse: a prefill has no stream to take over."""
        message = "a prefill replica runs nothing to adopt"
        session.outbox.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, message)

    def submit(self, session: CallerSession[PrefillSlot], submit: pb.Submit, now_s: float) -> None:
        """Queue or refuse one attempt. A seed waits for its handoff."""
        is_seed = submit.phase == pb.PHASE_SEED
        estimate_s = self._estimate_s(submit, now_s)
        refused = self._supersede(submit, now_s) or self._refusal(submit, estimate_s, now_s)
        if refused is not None:
            refused.send(session.outbox, submit.slot)
            self.prefilling.start_queued(now_s)  # the superseded attempt may have freed capacity
            return
        budget = submit.budget
        submitted = PrefillSubmission(
            request_id=submit.request_id,
            attempt=submit.attempt,
            start_position=submit.start_position,
            prompt_tokens=len(submit.token_ids) // 4,
            blocks=_blocks_needed(submit),
            priority=budget.priority,
            is_shadow=budget.shadow,
            is_resumed=submit.resumed,
            estimate_s=estimate_s,
            expected_s=estimate_s or self.prefilling.prefill_rate.guess_s(len(submit.token_ids) // 4),
            deadline_s=now_s + _left_s(submit),
            submitted_s=now_s,
            traceparent=submit.traceparent,
            vocabulary_size=submit.vocabulary_size,
            priority_class=budget.band if budget.HasField("band") else PRIORITY_CLASS_DEFAULT,
            tenant=budget.tenant,
            weight=budget.weight if budget.weight > 0 else 1.0,
            max_output_tokens=budget.max_output_tokens,
            end_token_ids=frames.ordered_end_token_ids(submit),
            is_guided=submit.sampling.HasField("guide"),
            purpose=control_purpose(budget),
            is_seed=is_seed,
        )
        slot = PrefillSlot(submitted, submit)
        if is_seed:
            self.slot_table.await_handoff(slot, session, submit.slot, now_s)
        else:
            self.slot_table.enqueue(slot, session, submit.slot)
        session.outbox.accept(submit.slot, urgent=is_seed)
        self.prefilling.start_queued(now_s)

    def hand_over(self, slot: PrefillSlot, handoff: pb.Handoff, now_s: float) -> None:
        """Start the pull of a seed. Raises FrameError."""
        self.seeding.hand_over(slot, handoff, now_s)
        self.prefilling.start_queued(now_s)

    def cancel(self, slot: PrefillSlot, reason: pb.Cancel.Reason.ValueType, now_s: float) -> None:
        """End `slot` at the request of its caller; nothing is sent. TRANSFERRED: the engine has dropped the handoff."""
        if reason == pb.Cancel.REASON_TRANSFERRED and slot.state is PrefillState.HELD:
            self.slot_table.forget(slot)
        else:
            self.prefilling.forget(slot, now_s)
        self.prefilling.start_queued(now_s)

    def next_wake_s(self) -> float | None:
        """Return when `on_timer` is to be called, or None."""
        times = (self.slot_table.deadline_heap.next_s(), self._heartbeat.next_s())
        return min((time for time in times if time is not None), default=None)

    def on_timer(self, now_s: float) -> None:
        """Check the due slots, send the due load report."""
        due = self.slot_table.deadline_heap.due(now_s)
        for slot in due:
            self._look_at(slot, now_s)
        if due:
            self.prefilling.start_queued(now_s)
        if self._heartbeat.take(now_s):
            report = self.load_report(now_s)
            for session in self.slot_table.sessions:
                if not session.outbox.is_full():
                    session.outbox.load(report)

    def drain(self) -> None:
        """Begin a graceful shutdown: refuse new submits; queued slots of users still run."""
        self.is_draining = True
        for slot in self.slot_table.lane:
            self.slot_table.look_by(slot, DRAIN_LOOK_S)
        self._heartbeat.touch()

    def undrain(self) -> None:
        """Take new submits again, after a drain by the control plane."""
        self.is_draining = False
        self._heartbeat.touch()

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to routers whether the control plane keeps the replica out of use."""
        self.is_cordoned = is_cordoned
        self._heartbeat.touch()

    def set_life(self, life: LifeView) -> None:
        """Report to routers whether the replica is held or quarantined, and its slow start."""
        self.life = life
        self._heartbeat.touch()

    def set_cached_blocks(self, engine_boot_id: str, blocks: int) -> None:
        """Take the number of blocks in the prefix cache of the engine with this boot id, counted from its KV events."""
        if self.prefilling.view.take_cached(engine_boot_id, blocks):
            self._heartbeat.touch()

    def cached_block_count(self) -> int:
        """Return the blocks in the engine's prefix cache."""
        return self.prefilling.view.cached_blocks

    def live_request_count(self) -> int:
        """Return the number of requests that are held here, those of the control plane included."""
        return len(self.slot_table.slots)

    def longest_wait_us(self, now_s: float) -> int:
        """Return the longest time that a user's prompt has waited for the engine, in microseconds."""
        return round(self.slot_table.queue.longest_wait_s(now_s) * 1e6)

    def is_idle(self) -> bool:
        """True if no slot is held."""
        return not self.slot_table.slots

    def load_report(self, now_s: float) -> pb.LoadReport:
        """Return the load for routers; stale engine reports are left out."""
        slot_table, view = self.slot_table, self.prefilling.view
        load = view.fresh(now_s)
        return pb.LoadReport(
            engine_boot_id=view.boot_id,
            block_total_count=slot_table.blocks_total,
            block_free_count=load.blocks_free if load else slot_table.blocks_free,
            queued_request_count=len(slot_table.queue),
            queued_token_count=slot_table.queue.tokens,
            running_request_count=self.prefilling.running_count,
            held_handoff_count=len(slot_table.held),
            step_us=round((load.step_s if load else 0.0) * 1e6),
            draining=self.is_draining or self.life.is_out_of_service,
            cordoned=self.is_cordoned,
            engine_ready=self.prefilling.is_ready,
            engine_memory_bytes=load.resident_bytes if load else 0,
            held=self.life.is_out_of_service,
            slow_start_age_ms=self.life.slow_start_age_ms(now_s),
            cold_step_total=load.cold_steps if load else None,
            cached_block_count=view.cached_blocks,
        )

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count disagrees with what it counts."""
        self.slot_table.assert_consistent()
        self.prefilling.assert_consistent()

    def _supersede(self, submit: pb.Submit, now_s: float) -> SubmitRefusal | None:
        """End a lower attempt of the same request; refuse `submit` if it is not the highest."""
        known = self.slot_table.slots.get(submit.request_id)
        if known is None:
            return None
        refused = superseded(known.submitted.attempt, submit.attempt)
        if refused is None:
            self.prefilling.cut(known, pb.Finish.REASON_SUPERSEDED, now_s)
        return refused

    def _estimate_s(self, submit: pb.Submit, now_s: float) -> float:
        """Return the expected seconds of the prefill of `submit`. 0: unknown, or a seed, which computes nothing."""
        if submit.phase == pb.PHASE_SEED:
            return 0.0
        if submit.prefill_estimate_us:
            return submit.prefill_estimate_us / 1e6
        return self.prefilling.prefill_rate.estimate_s(len(submit.token_ids) // 4, now_s)

    def _refusal(self, submit: pb.Submit, estimate_s: float, now_s: float) -> SubmitRefusal | None:
        refused = (
            not_serving(self.replica, is_draining=self.is_draining, is_ready=self.prefilling.is_ready)
            or quarantined(self.replica, self.life, submit.budget)
            or check_submit(submit, self.facts, self._phases, _blocks_needed(submit))
        )
        if refused is None and submit.phase == pb.PHASE_SEED:
            refused = check_purpose(submit)
        if refused is not None:
            return refused
        left_s = _left_s(submit)
        if left_s <= estimate_s:
            return too_late("the prefill", estimate_s, left_s)
        if control_purpose(submit.budget):
            is_reserving = submit.phase == pb.PHASE_SEED
            needed = _blocks_needed(submit) if is_reserving else 0
            table = self.slot_table
            return table.lane.refusal(needed, table.blocks_free, is_short=table.is_short())
        queue = self.slot_table.queue
        if queue.is_full():
            message = f"prefill queue full: {len(queue)}/{queue.requests_max}"
            return SubmitRefusal(
                pb.Refusal.REASON_QUEUE_FULL, message, retry_after_ms=self.prefilling.retry_after_ms(now_s)
            )
        return None

    def _refuse_drained(self, slot: PrefillSlot, now_s: float) -> None:
        """Refuse a waiting slot of the control plane; no engine call was made."""
        refused = not_serving(self.replica, is_draining=True, is_ready=True)
        if refused is not None and slot.session is not None:
            refused.send(slot.session.outbox, slot.number)
        self.prefilling.forget(slot, now_s)

    def _look_at(self, slot: PrefillSlot, now_s: float) -> None:
        """End `slot` if one of its times has passed; else schedule the next check."""
        if slot.state is PrefillState.HELD:
            if slot.expire_s <= now_s:
                held_s = now_s - slot.called_s
                self.prefilling.fail(
                    slot, HandoffLost(f"no decode replica fetched the handoff for {held_s:.1f} s"), now_s
                )
            else:
                self.slot_table.look_by(slot, slot.expire_s)
        elif self.is_draining and slot.is_waiting_control():
            self._refuse_drained(slot, now_s)
        elif slot.state is PrefillState.PENDING:
            self.seeding.look_at(slot, now_s)
        elif slot.state is PrefillState.QUEUED:
            if slot.submitted.start_by_s <= now_s:
                self.prefilling.refuse_late(slot, now_s)
            else:
                self.slot_table.look_by(slot, slot.submitted.start_by_s)
        elif slot.submitted.deadline_s <= now_s:
            self.prefilling.cut(slot, pb.Finish.REASON_DEADLINE, now_s)
        elif self.prefilling.stall_s(slot) <= now_s:
            silent_s = now_s - slot.called_s
            self.prefilling.fail(slot, EngineStalled(f"no first token for {silent_s:.1f} s"), now_s)
        else:
            self.slot_table.look_by(slot, min(slot.submitted.deadline_s, self.prefilling.stall_s(slot)))


def _blocks_needed(submit: pb.Submit) -> int:
    """Return the KV blocks of the prompt; context_only computes no KV for its output token. A seed counts its token."""
    if submit.phase == pb.PHASE_SEED:
        return seed_blocks(submit)
    return count_for(len(submit.token_ids) // 4, submit.block_tokens)


def _left_s(submit: pb.Submit) -> float:
    """Return the seconds left for the first token of `submit`."""
    budget = submit.budget
    left_ms = budget.remaining_ms
    if budget.HasField("ttft_remaining_ms"):
        left_ms = min(left_ms, budget.ttft_remaining_ms)
    return deadlines.left_s(left_ms)
