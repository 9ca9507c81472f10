"""The slot table of a decode replica: slots, control lane, sessions, KV reservations, deadlines, drain rates. Pure.

These change together in this module alone, so that their counts agree.
"""

from __future__ import annotations

from kvmesh.attach.caller_session import CallerSession
from kvmesh.deadline_heap import DeadlineHeap
from kvmesh.drain_rate import DrainRate, Stock
from kvmesh.replica.control_lane import ControlLane
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from services.decode.closed_windows import ClosedWindows
from services.decode.finished import FinishedLogs
from services.decode.reservations import Reservations
from services.decode.slot import DecodeSlot, DecodeState


class DecodeSlotTable:
    """Slots by request id, with their session, reservation and deadline."""

    def __init__(self, kv_blocks: int, concurrency: int, heartbeat: LoadHeartbeat) -> None:
        """`concurrency`: slots of the replica, or sequences that its engine runs at once if these are fewer."""
        self.slots: dict[str, DecodeSlot] = {}
        """By request id: the highest known attempt, FINISHED slots included."""
        self.sessions: list[CallerSession[DecodeSlot]] = []
        self.finished = FinishedLogs()
        self.closed_windows = ClosedWindows(concurrency)
        self.reservations = Reservations(kv_blocks)
        self.lane: ControlLane[DecodeSlot] = ControlLane(concurrency, kv_blocks)
        """Unfinished slots of the control plane. The other counts and rates leave them out, except the reservations."""
        self.deadline_heap: DeadlineHeap[DecodeSlot] = DeadlineHeap()
        self.freed_blocks = DrainRate(Stock.HELD)
        self.freed_slots = DrainRate(Stock.HELD)
        self._heartbeat = heartbeat
        self._reserving = 0
        """Users' slots with a reservation."""

    def add(self, slot: DecodeSlot, session: CallerSession[DecodeSlot], number: int) -> None:
        """Hold a new slot and its reservation. A local slot of the control plane waits for its turn first."""
        if slot.submitted.purpose and slot.submitted.is_local:
            self.lane.push(slot, slot.blocks)
            slot.blocks, slot.state = 0, DecodeState.QUEUED
        else:
            self.reservations.reserve(slot.blocks)
            if slot.submitted.purpose:
                self.lane.await_handoff(slot, slot.blocks)
            else:
                self._reserving += 1
                self._stock(slot.submitted.submitted_s)
        self.slots[slot.submitted.request_id] = slot
        self.attach(slot, session, number)
        self.look_by(slot, slot.deadline_now_s())
        self._heartbeat.touch()

    def start_control(self, slot: DecodeSlot) -> None:
        """Reserve the blocks that a slot lacks whose turn has come in the lane."""
        blocks = self.lane.start(slot)
        self.reservations.reserve(blocks)
        slot.blocks += blocks

    def attach(self, slot: DecodeSlot, session: CallerSession[DecodeSlot], number: int) -> None:
        """Attach the detached `slot` to `session`."""
        assert slot.session is None, slot
        slot.session, slot.number = session, number
        session.slots[number] = slot
        slot.expire_s = float("inf")

    def detach(self, slot: DecodeSlot) -> None:
        """Detach `slot` from its session. The caller decides how long a detached slot is kept."""
        if slot.session is not None:
            del slot.session.slots[slot.number]
            slot.session, slot.number = None, 0
        slot.blocked_s, slot.first = None, None
        self.closed_windows.open(slot)

    def expire_at(self, slot: DecodeSlot, at_s: float) -> None:
        """Drop `slot` at `at_s` unless a takeover comes before."""
        slot.expire_s = at_s
        self.look_by(slot, at_s)

    def look_by(self, slot: DecodeSlot, at_s: float) -> None:
        """Check `slot` no later than `at_s`."""
        self.deadline_heap.by(slot, at_s)

    def release(self, slot: DecodeSlot, now_s: float) -> None:
        """Release the reservation of `slot`. Idempotent."""
        if slot.blocks:
            self.reservations.release(slot.blocks)
            if slot.submitted.purpose:
                self.lane.release(slot)
            else:
                self.freed_blocks.freed(slot.blocks, now_s)
                self.freed_slots.freed(1, now_s)  # free once its reader has the remaining tokens
                self._reserving -= 1
                self._stock(now_s)
            slot.blocks = 0
            self._heartbeat.touch()

    def finish(self, slot: DecodeSlot, at_s: float) -> None:
        """Move a fully sent slot to FINISHED; keep its log until `at_s`. Drop a slot of the control plane: it has no
        takeover."""
        if slot.submitted.purpose:
            self.forget(slot, at_s)
            return
        slot.state = DecodeState.FINISHED
        self.detach(slot)
        self.expire_at(slot, at_s)
        for one in self.finished.add(slot):
            self.forget(one, at_s)

    def revive(self, slot: DecodeSlot) -> None:
        """Move a finished slot back to ENDED for a takeover."""
        if slot.state is DecodeState.FINISHED:
            self.finished.discard(slot)
            slot.state = DecodeState.ENDED

    def forget(self, slot: DecodeSlot, now_s: float) -> None:
        """Drop `slot`. Its engine call must be over."""
        assert not slot.call_id, slot
        self.release(slot, now_s)
        self.lane.forget(slot)
        self.detach(slot)
        if self.slots.get(slot.submitted.request_id) is slot:
            del self.slots[slot.submitted.request_id]
        self.finished.discard(slot)
        self.deadline_heap.forget(slot)
        self._heartbeat.touch()

    def held_count(self) -> int:
        """Return the number of unfinished slots, those of the control plane included."""
        return len(self.slots) - len(self.finished)

    def user_count(self) -> int:
        """Return the number of users' unfinished slots."""
        return self.held_count() - len(self.lane)

    def pending_count(self) -> int:
        """Return the number of slots that wait for a handoff, those of the control plane included."""
        return sum(slot.state is DecodeState.PENDING for slot in self.slots.values())

    def pending_user_count(self) -> int:
        """Return the number of users' slots that wait for a handoff."""
        return self.pending_count() - sum(slot.state is DecodeState.PENDING for slot in self.lane)

    def detached_count(self) -> int:
        """Return the number of detached slots."""
        return sum(slot.is_detached() for slot in self.slots.values())

    def log_bytes(self) -> int:
        """Return the bytes of output ids that are kept."""
        return sum(slot.log.size_bytes for slot in self.slots.values())

    def _stock(self, now_s: float) -> None:
        self.freed_blocks.stock(self.reservations.reserved - self.lane.blocks, now_s)
        self.freed_slots.stock(self._reserving, now_s)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count disagrees with what it counts."""
        self.closed_windows.assert_consistent()
        slots = list(self.slots.values())
        assert self.reservations.reserved == sum(slot.blocks for slot in slots), slots
        self.lane.assert_consistent()
        control = {slot for slot in slots if slot.submitted.purpose}
        assert set(self.lane) == control, (list(self.lane), control)
        assert self.lane.blocks == sum(slot.blocks for slot in control), control
        assert self.lane.running_count == sum(slot.state is DecodeState.RUNNING for slot in control), control
        assert self._reserving == sum(slot.blocks > 0 for slot in slots if slot not in control), slots
        read = [slot for session in self.sessions for slot in session.slots.values()]
        assert {id(slot) for slot in read} == {id(slot) for slot in slots if slot.session}, slots
        for slot in slots:
            assert slot.session is None or slot.session.slots[slot.number] is slot, slot
            assert slot.session is None or slot.session in self.sessions, slot
            assert bool(slot.call_id) == (slot.state is DecodeState.RUNNING), slot
            assert bool(slot.blocks) == (slot.state in (DecodeState.PENDING, DecodeState.RUNNING)), slot
            assert (slot in self.finished) == (slot.state is DecodeState.FINISHED), slot
            assert slot in self.deadline_heap, f"{slot} has no deadline"
            assert slot.session is not None or slot.expire_s < float("inf"), slot
            assert slot.session is not None or not (slot.is_waiting() or slot.submitted.purpose), slot
            is_queued = slot.state is DecodeState.QUEUED
            assert self.lane.awaits_turn(slot) == (is_queued or slot.handoff is not None), slot
            assert not is_queued or slot.submitted.purpose, slot
        assert len(self.deadline_heap) == len(slots), slots
        self.finished.assert_consistent()
