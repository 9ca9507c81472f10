"""Decisions of a decode replica: admission control, stream takeover, deadlines and cancellation of slots. Pure.

Events come in through sessions (callers), `generation` (the engine's sink) and `on_timer`. Effects leave through the
sessions' outboxes and the EnginePort. The shell calls `next_wake_s` after every event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kvmesh.attach import frames
from kvmesh.attach.caller_session import AttachedCore, CallerSession
from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.refusal import SubmitRefusal, superseded
from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import from_remaining_ms
from kvmesh.replica.admission import check_submit, not_serving, quarantined
from kvmesh.replica.calls import control_purpose
from kvmesh.replica.life_view import IN_SERVICE, LifeView
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import EngineStalled, HandoffLost
from kvmesh.triton.port import EnginePort
from services.decode.bounds import blocks_needed, check_headroom, check_time, headroom_blocks
from services.decode.generation import Generation
from services.decode.handoff_trial import HandoffTrial
from services.decode.limits import DecodeLimits
from services.decode.records import Recorder, discard_record
from services.decode.slot import DecodeSlot, DecodeState, DecodeSubmission
from services.decode.slot_table import DecodeSlotTable

DRAIN_LOOK_S: Final = 0.0
"""Any time in the past: a drain checks the waiting slots of the control plane at once."""

NO_HANDOFFS: Final = "the engine of {replica} takes no handoffs: it runs every prompt itself"


class DecodeCore(AttachedCore[DecodeSlot]):
    """See the module's docstring. Call `connect` before the first event."""

    def __init__(
        self,
        replica: str,
        facts: ModelFacts,
        limits: DecodeLimits,
        is_source: Callable[[str, float], bool],
        record: Recorder = discard_record,
    ) -> None:
        """`is_source(address, now_s)`: True if KV blocks may be pulled from the address. `record`: called for each ended
        engine call."""
        self.replica = replica
        self.facts = facts
        self.limits = limits
        self.is_draining = False
        self.is_cordoned = False
        """True while the control plane keeps the replica out of use. Routers leave it alone; submits are still taken."""
        self.takeover_total = 0
        self.life = IN_SERVICE
        """The replica's life: a held replica gets nothing new from routers, a quarantined one refuses users."""
        self._heartbeat = LoadHeartbeat()
        self.slow_reader_cuts = {"time": 0, "share": 0}
        """Slots ended because their client did not read: by the slow-reader time, or by the share of slots."""
        concurrency = min(limits.slots_max, facts.max_sequences or limits.slots_max)
        self.slot_table = DecodeSlotTable(facts.kv_blocks, concurrency, self._heartbeat)
        self.trial = HandoffTrial(facts)
        self.generation = Generation(
            replica,
            facts.tokens_per_block,
            limits,
            self.slot_table,
            self._heartbeat,
            record,
            trial=self.trial,
            appends_end_token=not facts.capabilities.end_token,
        )
        self._is_source = is_source
        self._phases: tuple[pb.Phase.ValueType, ...] = (
            pb.PHASE_CONTEXT_AND_GENERATION,
            pb.PHASE_GENERATION_ONLY,
        )

    def __repr__(self) -> str:
        return f"DecodeCore({self.replica}, {list(self.slot_table.slots.values())})"

    @property
    def sink(self) -> Generation:
        """The receiver of the engine's events."""
        return self.generation

    def connect(self, engine: EnginePort) -> None:
        """Set the engine; called once."""
        self.generation.engine = engine

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> CallerSession[DecodeSlot]:
        """See kvmesh.attach.server.Attachable."""
        session = CallerSession[DecodeSlot](self, peer.process_id, outbox)
        self.slot_table.sessions.append(session)
        self._heartbeat.has_listener = True
        outbox.load(self.load_report(now_s))
        return session

    def close_session(self, session: CallerSession[DecodeSlot], now_s: float) -> None:
        """Handle the loss of a stream: waiting slots and those of the control plane end.

        The others are detached and wait for a takeover.
        """
        self.slot_table.sessions.remove(session)
        self._heartbeat.has_listener = bool(self.slot_table.sessions)
        for slot in list(session.slots.values()):
            if slot.is_waiting() or slot.submitted.purpose:
                self.generation.forget(slot, now_s)
            else:
                self.slot_table.detach(slot)
                self.slot_table.expire_at(slot, now_s + self.limits.detached_s)

    def submit(self, session: CallerSession[DecodeSlot], submit: pb.Submit, now_s: float) -> None:
        """Take or refuse one attempt."""
        refused = self._supersede(submit, now_s) or self._refusal(submit, now_s)
        if refused is not None:
            if self._no_handoffs(submit) is not None:  # its router places the attempt again, by this report
                session.outbox.load(self.load_report(now_s))
            refused.send(session.outbox, submit.slot)
            return
        budget = submit.budget
        is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        has_ttft = budget.HasField("ttft_remaining_ms")
        submitted = DecodeSubmission(
            request_id=submit.request_id,
            attempt=submit.attempt,
            is_local=is_local,
            prompt_tokens=len(submit.token_ids) // 4,
            max_output_tokens=budget.max_output_tokens,
            deadline_s=from_remaining_ms(budget.remaining_ms, now_s),
            ttft_deadline_s=from_remaining_ms(budget.ttft_remaining_ms, now_s) if has_ttft else float("inf"),
            submitted_s=now_s,
            traceparent=submit.traceparent,
            tenant=budget.tenant,
            vocabulary_size=submit.vocabulary_size,
            purpose=control_purpose(budget),
            end_token_ids=frames.ordered_end_token_ids(submit),
            is_guided=submit.sampling.HasField("guide"),
        )
        log = TokenLog(
            submit.start_position,
            submit.credit_position,
            with_logprobs=submit.logprobs,
            alternatives=submit.sampling.alternative_count,
        )
        slot = DecodeSlot(submitted, log, blocks_needed(submit), submit, has_first_row=is_local)
        self.slot_table.add(slot, session, submit.slot)
        session.outbox.accept(submit.slot)
        if not is_local and self.trial.begin(slot):
            self._heartbeat.touch()
        if submitted.purpose:
            self.generation.start_control(now_s)
        elif is_local:
            self.generation.start(slot, now_s)

    def hand_over(self, slot: DecodeSlot, handoff: pb.Handoff, now_s: float) -> None:
        """Start generating from `handoff`; a slot that waits for none ignores it. Raises FrameError.

        If no time is left for another token, the slot ends with the tokens that its caller has.
        """
        if slot.state is not DecodeState.PENDING or slot.handoff is not None:
            return
        if not 0 <= handoff.first_token_count <= slot.submitted.max_output_tokens:
            raise FrameError(
                f"handoff.first_token_count is {handoff.first_token_count}; "
                f"0 to {slot.submitted.max_output_tokens} is allowed"
            )
        if not self._may_pull(handoff.kv_address, now_s):
            error = HandoffLost(
                f"{handoff.kv_address!r} is not the KV address of a registered prefill replica"
            )
            self.generation.fail(slot, error, now_s)
            return
        if self.trial.is_aggregated and not self.trial.is_of(slot):
            self.generation.fail(slot, HandoffLost(NO_HANDOFFS.format(replica=self.replica)), now_s)
            return
        slot.handed_tokens = handoff.first_token_count
        slot.log.sent = slot.log.start + slot.handed_tokens
        if slot.submitted.deadline_s - now_s <= self.generation.fresh_step_s(now_s):
            self.generation.cut(slot, pb.Finish.REASON_DEADLINE, now_s)
        elif slot.submitted.purpose:
            slot.handoff = handoff
            self.slot_table.lane.push(slot)
            self.generation.start_control(now_s)
        else:
            self.generation.start(slot, now_s, handoff)

    def _may_pull(self, address: str, now_s: float) -> bool:
        """Return whether KV blocks may be pulled from `address`. Engines that tell no address may exchange handoffs."""
        return bool(address or not self.facts.kv_address) and self._is_source(address, now_s)

    def on_sources(self, sources: frozenset[object]) -> None:
        """Take the prefill replicas of the pool, each with its boot."""
        if self.trial.on_sources(sources):
            self._heartbeat.touch()

    def grant(self, slot: DecodeSlot, position: int, now_s: float) -> None:
        """Extend the flow-control window of `slot` to `position`: its client reads."""
        self.slot_table.closed_windows.open(slot)
        if slot.log.grant(position):
            slot.blocked_s = None
            self.generation.send(slot, now_s)

    def close_window(self, slot: DecodeSlot, now_s: float) -> None:
        """Note a closed client window; end the slot that ClosedWindows chooses if there are too many.

        A slot of the control plane has no client.
        """
        if slot.submitted.purpose:
            return
        longest = self.slot_table.closed_windows.close(slot)
        if longest is not None:
            self._cut_slow(longest, "share", now_s)

    def cancel(self, slot: DecodeSlot, reason: pb.Cancel.Reason.ValueType, now_s: float) -> None:
        """End `slot` at the request of its caller, for any reason; nothing is sent for it."""
        self.generation.forget(slot, now_s)

    def after_message(self, now_s: float) -> None:
        """Start calls of the control plane for which ended slots made room."""
        self.generation.start_control(now_s)

    def adopt(self, session: CallerSession[DecodeSlot], adopt: pb.Adopt, now_s: float) -> None:
        """Stream takeover: move a running or finished slot to `session`, or refuse."""
        slot = self.slot_table.slots.get(adopt.request_id)
        if (
            slot is None
            or slot.submitted.attempt != adopt.attempt
            or slot.state is DecodeState.PENDING
            or slot.submitted.purpose
        ):
            found = "unknown" if slot is None else f"in attempt {slot.submitted.attempt}, {slot.state.value}"
            message = f"request {adopt.request_id} is {found} here; attempt {adopt.attempt} is wanted"
            session.outbox.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, message)
            return
        if adopt.adoption < slot.takeover:
            message = f"takeover {slot.takeover} of the request is known here; {adopt.adoption} came late"
            session.outbox.refuse(adopt.slot, pb.Refusal.REASON_SUPERSEDED, message)
            return
        log = slot.log
        if not log.start <= adopt.position <= slot.known_position():
            message = f"position is {adopt.position}: {log.start} to {slot.known_position()} is allowed"
            session.outbox.refuse(adopt.slot, pb.Refusal.REASON_INVALID, message, field="position")
            return
        if slot.session is not None:
            slot.session.outbox.finish(slot.number, log.sent, pb.Finish.REASON_ADOPTED)
        self.slot_table.detach(slot)
        self.slot_table.revive(slot)
        self.slot_table.attach(slot, session, adopt.slot)
        slot.has_first_row = False
        slot.takeover = adopt.adoption
        slot.computed_told = 0
        log.rewind(adopt.position, adopt.credit_position)
        self.takeover_total += 1
        session.outbox.accept(adopt.slot)
        self._look_at(slot, now_s)
        self.generation.send(slot, now_s)

    def next_wake_s(self) -> float | None:
        """Return the time of the next `on_timer`, or None."""
        # Runs after every token: a generator over these values takes longer than all else in this method.
        wake_s = self.slot_table.deadline_heap.next_s()
        for other_s in (self.generation.step_batch.due_s(), self._heartbeat.next_s(), self.trial.next_s):
            if other_s is not None and (wake_s is None or other_s < wake_s):
                wake_s = other_s
        return wake_s

    def on_timer(self, now_s: float) -> None:
        """Flush the due step frame, check the due slots, send the due load report."""
        due_s = self.generation.step_batch.due_s()
        if due_s is not None and due_s <= now_s:
            self.generation.flush(now_s)
        for slot in self.slot_table.deadline_heap.due(now_s):
            self._look_at(slot, now_s)
        self.generation.start_control(now_s)
        if self.trial.on_timer(now_s):
            self._heartbeat.touch()
        if self._heartbeat.take(now_s):
            report = self.load_report(now_s)
            for session in self.slot_table.sessions:
                if not session.outbox.is_full():
                    session.outbox.load(report)

    def drain(self) -> None:
        """Begin a graceful shutdown: refuse new submits; takeovers are still served."""
        self.is_draining = True
        for slot in self.slot_table.lane:
            if slot.is_waiting():
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
        if self.generation.view.take_cached(engine_boot_id, blocks):
            self._heartbeat.touch()

    def cached_block_count(self) -> int:
        """Return the blocks in the engine's prefix cache."""
        return self.generation.view.cached_blocks

    def live_request_count(self) -> int:
        """Return the number of requests that are held here, those of the control plane included."""
        return self.slot_table.held_count()

    def longest_wait_us(self, now_s: float) -> int:
        """Return 0: a decode replica refuses what it cannot run at once, so its users wait at routers."""
        return 0

    def is_idle(self) -> bool:
        """True if only finished logs are held."""
        return not self.slot_table.held_count()

    def load_report(self, now_s: float) -> pb.LoadReport:
        """Return the load for routers; stale engine reports are left out."""
        reservations, generation = self.slot_table.reservations, self.generation
        load = generation.view.fresh(now_s)
        return pb.LoadReport(
            engine_boot_id=generation.view.boot_id,
            block_total_count=reservations.total,
            block_free_count=load.blocks_free if load else reservations.free,
            block_reserved_count=reservations.reserved,
            queued_request_count=self.slot_table.pending_user_count(),
            running_request_count=generation.running_count,
            step_us=round(generation.fresh_step_s(now_s) * 1e6),
            draining=self.is_draining or self.life.is_out_of_service,
            cordoned=self.is_cordoned,
            engine_ready=generation.is_ready,
            engine_memory_bytes=load.resident_bytes if load else 0,
            held=self.life.is_out_of_service,
            slow_start_age_ms=self.life.slow_start_age_ms(now_s),
            cold_step_total=load.cold_steps if load else None,
            cached_block_count=generation.view.cached_blocks,
            aggregated=self.trial.is_aggregated,
        )

    def capability_names(self) -> list[str]:
        """Return the capabilities that the engine has shown, sorted."""
        names = self.facts.capabilities.names()
        return [name for name in names if name != "disaggregated" or not self.trial.is_aggregated]

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count disagrees with what it counts."""
        self.slot_table.assert_consistent()
        self.generation.assert_consistent()

    def _supersede(self, submit: pb.Submit, now_s: float) -> SubmitRefusal | None:
        """End a lower attempt of the same request; refuse `submit` if it is not the highest."""
        known = self.slot_table.slots.get(submit.request_id)
        if known is None:
            return None
        refused = superseded(known.submitted.attempt, submit.attempt)
        if refused is None:
            self.generation.cut(known, pb.Finish.REASON_SUPERSEDED, now_s)
        return refused

    def _refusal(self, submit: pb.Submit, now_s: float) -> SubmitRefusal | None:
        needed = blocks_needed(submit)
        headroom = headroom_blocks(submit, self.facts.kv_blocks)
        refused = (
            not_serving(self.replica, is_draining=self.is_draining, is_ready=self.generation.is_ready)
            or quarantined(self.replica, self.life, submit.budget)
            or self._no_handoffs(submit)
            or check_submit(submit, self.facts, self._phases, needed)
            or check_headroom(submit, needed, headroom, self.facts.kv_blocks)
            or check_time(submit, self.generation.fresh_step_s(now_s))
        )
        if refused is not None:
            return refused
        slot_table = self.slot_table
        if control_purpose(submit.budget):
            is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
            free = slot_table.reservations.free
            return slot_table.lane.refusal(0 if is_local else needed, free, is_short=False)
        held, slots_max = slot_table.user_count(), self.limits.slots_max
        if held >= slots_max:
            message = f"slots full: {held}/{slots_max}"
            retry_ms = slot_table.freed_slots.retry_ms(held + 1 - slots_max, now_s)
            return SubmitRefusal(pb.Refusal.REASON_QUEUE_FULL, message, retry_after_ms=retry_ms)
        if not slot_table.reservations.can_reserve(needed, headroom):
            free, total = slot_table.reservations.free, slot_table.reservations.total
            beside = f" beside {headroom} of headroom" if headroom else ""
            message = f"KV full: {needed} blocks needed{beside}, {free}/{total} free"
            retry_ms = slot_table.freed_blocks.retry_ms(needed + headroom - free, now_s)
            return SubmitRefusal(pb.Refusal.REASON_KV_FULL, message, retry_after_ms=retry_ms)
        return None

    def _no_handoffs(self, submit: pb.Submit) -> SubmitRefusal | None:
        """Return the refusal of a handoff that the engine cannot take. The router places the attempt again."""
        if submit.phase != pb.PHASE_GENERATION_ONLY or not self.trial.is_aggregated:
            return None
        return SubmitRefusal(pb.Refusal.REASON_DRAINING, NO_HANDOFFS.format(replica=self.replica))

    def _look_at(self, slot: DecodeSlot, now_s: float) -> None:
        """End `slot` if one of its times has passed; else schedule the next check."""
        if slot.expire_s <= now_s:
            self.generation.forget(slot, now_s)
            return
        if self.is_draining and slot.submitted.purpose and slot.is_waiting():
            self._refuse_drained(slot, now_s)
            return
        next_s = slot.expire_s
        if slot.state is not DecodeState.FINISHED:
            deadline_s = slot.deadline_now_s()
            if deadline_s <= now_s:
                self.generation.cut(slot, pb.Finish.REASON_DEADLINE, now_s)
                return
            next_s = min(next_s, deadline_s)
        if slot.state is DecodeState.RUNNING:
            stall_s = self.generation.stall_s(slot)
            if stall_s <= now_s:
                silent_s = now_s - slot.heard_s
                self.generation.fail(slot, EngineStalled(f"no token for {silent_s:.1f} s"), now_s)
                return
            next_s = min(next_s, stall_s)
        if slot.blocked_s is not None:
            slow_s = slot.blocked_s + self.limits.slow_reader_s
            if slow_s <= now_s:
                self._cut_slow(slot, "time", now_s)
                return
            next_s = min(next_s, slow_s)
        self.slot_table.look_by(slot, next_s)

    def _refuse_drained(self, slot: DecodeSlot, now_s: float) -> None:
        """Refuse a waiting slot of the control plane; no engine call was made."""
        refused = not_serving(self.replica, is_draining=True, is_ready=True)
        if refused is not None and slot.session is not None:
            refused.send(slot.session.outbox, slot.number)
        self.generation.forget(slot, now_s)

    def _cut_slow(self, slot: DecodeSlot, cause: Literal["time", "share"], now_s: float) -> None:
        self.slow_reader_cuts[cause] += 1
        self.generation.cut(slot, pb.Finish.REASON_SLOW_READER, now_s)
