"""The slot table of a prefill replica: slots, queue, control lane, sessions, reserved KV blocks, deadlines. Pure.

These change together in this module alone, so that their counts agree.
"""

from __future__ import annotations

from kvmesh.attach.caller_session import CallerSession
from kvmesh.deadline_heap import DeadlineHeap
from kvmesh.replica.control_lane import LIGHT_S, ControlLane
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from services.prefill.limits import PrefillLimits
from services.prefill.queue import PrefillQueue
from services.prefill.slot import PrefillSlot, PrefillState


class PrefillSlotTable:
    """Slots by request id, with their session, queue entry and deadline.

    INVARIANT: `blocks_reserved` = blocks of all slots that are not QUEUED <= `blocks_total`.
    """

    def __init__(self, kv_blocks: int, limits: PrefillLimits, heartbeat: LoadHeartbeat) -> None:
        self.slots: dict[str, PrefillSlot] = {}
        """By request id: the highest known attempt."""
        self.sessions: list[CallerSession[PrefillSlot]] = []
        self.queue = PrefillQueue(limits.queue_max_requests, limits.order_key)
        """Users' slots."""
        self.lane: ControlLane[PrefillSlot] = ControlLane(limits.engine_concurrency, kv_blocks)
        """Slots of the control plane."""
        self.held: dict[PrefillSlot, None] = {}
        """Oldest first."""
        self.deadline_heap: DeadlineHeap[PrefillSlot] = DeadlineHeap()
        self.blocks_total = kv_blocks
        self.blocks_reserved = 0
        self._heartbeat = heartbeat

    @property
    def blocks_free(self) -> int:
        """KV blocks that are not reserved."""
        return self.blocks_total - self.blocks_reserved

    def enqueue(self, slot: PrefillSlot, session: CallerSession[PrefillSlot], number: int) -> None:
        """Add a new slot to the queue, or to the lane of the control plane."""
        if slot.submitted.purpose:
            self.lane.push(slot, slot.submitted.blocks, is_light=0 < slot.submitted.estimate_s <= LIGHT_S)
        else:
            self.queue.push(slot)
        self._add(slot, session, number, slot.submitted.start_by_s)

    def await_handoff(
        self, slot: PrefillSlot, session: CallerSession[PrefillSlot], number: int, until_s: float
    ) -> None:
        """Add a new seed and reserve its blocks; check it at `until_s`. Raises ValueError if the lane has no room."""
        self.lane.await_handoff(slot, slot.submitted.blocks)
        slot.state = PrefillState.PENDING
        self.blocks_reserved += slot.submitted.blocks
        self._add(slot, session, number, until_s)

    def can_run(self, slot: PrefillSlot) -> bool:
        """True if the blocks of `slot` are free."""
        return self.blocks_reserved + slot.submitted.blocks <= self.blocks_total

    def is_short(self) -> bool:
        """True if the head of the queue waits for KV blocks."""
        head = self.queue.head()
        return head is not None and not self.can_run(head)

    def run(self, slot: PrefillSlot) -> None:
        """Move a queued slot to RUNNING and reserve its blocks. Raises ValueError unless it fits."""
        if not self.can_run(slot):
            raise ValueError(f"{slot} does not fit: {self.blocks_reserved}/{self.blocks_total} are reserved")
        self.queue.take(slot)
        slot.state = PrefillState.RUNNING
        self.blocks_reserved += slot.submitted.blocks
        self._heartbeat.touch()

    def run_control(self, slot: PrefillSlot) -> None:
        """Move a slot that waits in the lane to RUNNING, and reserve the blocks that it lacks."""
        self.blocks_reserved += self.lane.start(slot)
        slot.state = PrefillState.RUNNING
        self._heartbeat.touch()

    def hold(self, slot: PrefillSlot, until_s: float) -> None:
        """Move a slot to HELD until `until_s`: the engine keeps its blocks."""
        slot.state = PrefillState.HELD
        self.held[slot] = None
        self.expire_at(slot, until_s)
        self._heartbeat.touch()

    def expire_at(self, slot: PrefillSlot, at_s: float) -> None:
        """Release the handoff of `slot` at `at_s`, or at its earlier expiry."""
        slot.expire_s = min(slot.expire_s, at_s)
        self.look_by(slot, slot.expire_s)

    def look_by(self, slot: PrefillSlot, at_s: float) -> None:
        """Check `slot` no later than `at_s`."""
        self.deadline_heap.by(slot, at_s)

    def detach(self, slot: PrefillSlot) -> None:
        """Detach `slot` from its session."""
        if slot.session is not None:
            del slot.session.slots[slot.number]
            slot.session, slot.number = None, 0

    def forget(self, slot: PrefillSlot) -> None:
        """Drop `slot`. Its engine call must be over, its handoff released or being released."""
        assert not slot.call_id, slot
        if slot.state is not PrefillState.QUEUED:
            self.blocks_reserved -= slot.submitted.blocks
        self.queue.remove(slot)
        self.lane.forget(slot)
        self.held.pop(slot, None)
        self.detach(slot)
        if self.slots.get(slot.submitted.request_id) is slot:
            del self.slots[slot.submitted.request_id]
        self.deadline_heap.forget(slot)
        self._heartbeat.touch()

    def _add(
        self, slot: PrefillSlot, session: CallerSession[PrefillSlot], number: int, look_s: float
    ) -> None:
        self.slots[slot.submitted.request_id] = slot
        slot.session, slot.number = session, number
        session.slots[number] = slot
        self.look_by(slot, look_s)
        self._heartbeat.touch()

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count disagrees with what it counts."""
        slots = list(self.slots.values())
        reserving = [slot for slot in slots if slot.state is not PrefillState.QUEUED]
        assert self.blocks_reserved == sum(slot.submitted.blocks for slot in reserving), slots
        queued = [slot for slot in slots if slot.state is PrefillState.QUEUED and not slot.submitted.purpose]
        self.lane.assert_consistent()
        control = {slot for slot in slots if slot.submitted.purpose}
        assert set(self.lane) == control, (list(self.lane), control)
        assert self.lane.blocks == sum(slot.submitted.blocks for slot in control & set(reserving)), control
        running = [slot for slot in control if slot.state is PrefillState.RUNNING]
        assert self.lane.running_count == len(running), control
        assert 0 <= self.blocks_reserved <= self.blocks_total, self.blocks_reserved
        assert len(self.queue) == len(queued) and all(slot in self.queue for slot in queued), slots
        assert self.queue.tokens == sum(slot.submitted.prompt_tokens for slot in queued), slots
        assert {slot for slot in slots if slot.state is PrefillState.HELD} == set(self.held), slots
        read = [slot for session in self.sessions for slot in session.slots.values()]
        assert {id(slot) for slot in read} == {id(slot) for slot in slots if slot.session}, slots
        for slot in slots:
            assert slot.session is None or slot.session.slots[slot.number] is slot, slot
            assert slot.session is None or slot.session in self.sessions, slot
            assert slot.session is not None or slot.state is PrefillState.HELD, slot
            assert bool(slot.call_id) == (slot.state is PrefillState.RUNNING), slot
            assert bool(slot.context_phase_params) or slot.state is not PrefillState.HELD, slot
            if slot.state is PrefillState.PENDING:
                assert slot.submitted.is_seed and self.lane.awaits_turn(slot) == bool(slot.handoff), slot
            assert slot in self.deadline_heap, f"{slot} has no deadline"
        assert len(self.deadline_heap) == len(slots), slots
