"""State machine of the calls on one step stream: submits, frames, cancels and losses in; events of the sink out. Pure.

    open      the call may get rows
    closing   the caller has cancelled; rows are dropped, and a handoff that the engine still made is released

A slot ends with its final row or error row, with a refusal, or with its deadline. A closing slot is given up after
CLOSING_S. Slot numbers are never reused.

Frames have consecutive numbers. After a renewal the frames of two requests may overtake each other, so a frame is held
until its predecessors have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvmesh.deadline_heap import DeadlineHeap
from kvmesh.triton import errors
from kvmesh.triton.errors import CallError, EngineError, EngineStalled
from kvmesh.triton.port import EngineCall, EngineSink, FirstAnswer
from kvmesh.triton.step_frames import FIRST_NUMBER, ErrorRow, FinalRow, FirstRow, StepFrame, TokenRow

CLOSING_S: Final = 5.0
"""Seconds that the end of a cancelled call is awaited."""

HELD_FRAMES_MAX: Final = 256
"""Most frames that wait for a predecessor."""


@dataclass(slots=True, eq=False)
class Slot:
    """One call. `position`: tokens that the sink has. `is_over`: the sink gets no more events."""

    number: int
    call_id: int
    call: EngineCall
    position: int = 0
    has_first: bool = False
    is_over: bool = False


class StepSlots:
    """The calls of one step stream. `take`, `refuse`, `expire` and `lose` call `sink`.

    `cancel_slot` gets the number of a slot that the engine shall end, `release` a handoff without a call.

    INVARIANT: each call gets exactly one of `on_end` and `on_error`, unless it is cancelled before. A slot is in the table
    from `submit` to its end.
    """

    def __init__(
        self, sink: EngineSink, cancel_slot: Callable[[int], None], release: Callable[[bytes], None]
    ) -> None:
        self._sink = sink
        self._cancel_slot = cancel_slot
        self._release = release
        self._slots: dict[int, Slot] = {}
        self._by_call: dict[int, Slot] = {}
        """Open slots by call id."""
        self._by_request: dict[str, Slot] = {}
        self._deadlines: DeadlineHeap[int] = DeadlineHeap()
        self._last_slot = 0
        self._next_frame = FIRST_NUMBER
        self._held: dict[int, StepFrame] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"StepSlots({list(self._slots)}, next frame {self._next_frame}, held {sorted(self._held)})"

    @property
    def has_begun(self) -> bool:
        """True once the first frame of the step stream was applied."""
        return self._next_frame > FIRST_NUMBER

    def submit(self, call_id: int, call: EngineCall, now_s: float) -> int:
        """Add a call, and return its slot."""
        self._last_slot += 1
        slot = Slot(self._last_slot, call_id, call)
        self._slots[slot.number] = self._by_call[call_id] = self._by_request[call.request_id] = slot
        self._deadlines.by(slot.number, now_s + call.timeout_s)
        return slot.number

    def cancel(self, call_id: int, now_s: float) -> int | None:
        """Cancel a call, and return its slot, which is now closing. Unknown ids, and calls that are over, give None."""
        slot = self._by_call.pop(call_id, None)
        if slot is None:
            return None
        slot.is_over = True
        self._deadlines.by(slot.number, now_s + CLOSING_S)
        return slot.number

    def forget(self, number: int) -> None:
        """Remove a cancelled slot that the engine has never got."""
        self._end(self._slots[number])

    def take(self, frame: StepFrame, now_s: float) -> list[StepFrame]:
        """Apply `frame` and the held frames behind it, and return the applied ones.

        A frame that was applied before is dropped. Raises EngineError if too many frames wait for a predecessor.
        """
        if frame.number < self._next_frame:
            return []
        self._held[frame.number] = frame
        if len(self._held) > HELD_FRAMES_MAX:
            raise EngineError(
                f"step frame {self._next_frame} is missing: frames up to {max(self._held)} came, and at most "
                f"{HELD_FRAMES_MAX} wait for a predecessor"
            )
        applied = []
        while (due := self._held.pop(self._next_frame, None)) is not None:
            self._next_frame += 1
            self._apply(due, now_s)
            applied.append(due)
        return applied

    def refuse(self, request_id: str, error: CallError, now_s: float) -> bool:
        """Fail the call whose request Triton or the engine has refused. Return False for an unknown request."""
        slot = self._by_request.get(request_id)
        if slot is None:
            return False
        self._fail(slot, error, now_s)
        return True

    def fail(self, number: int, error: CallError, now_s: float) -> None:
        """Fail the call in a slot. Unknown slots are ignored."""
        slot = self._slots.get(number)
        if slot is not None:
            self._fail(slot, error, now_s)

    def next_wake_s(self) -> float | None:
        """Return the time of the next `expire`, or None."""
        return self._deadlines.next_s()

    def expire(self, now_s: float) -> None:
        """Fail the calls that take longer than their timeouts, and give up closing slots."""
        for number in self._deadlines.due(now_s):
            slot = self._slots.get(number)
            if slot is None:
                continue
            if slot.is_over:
                self._end(slot)
            else:
                self._break(
                    slot, EngineStalled(f"the call took longer than {slot.call.timeout_s:g} s"), now_s
                )

    def lose(self, error: CallError, now_s: float) -> list[str]:
        """Fail all calls, and begin a new step stream. Return the request ids of all slots, closing ones included."""
        lost = list(self._slots.values())
        for slot in lost:
            self._end(slot)
        self._next_frame = FIRST_NUMBER
        self._held.clear()
        for slot in lost:
            self._report(slot, error, now_s)
        return [slot.call.request_id for slot in lost]

    def assert_consistent(self) -> None:
        """Raise AssertionError if the tables disagree."""
        opened = {slot.call_id: slot for slot in self._slots.values() if not slot.is_over}
        assert opened == self._by_call, (opened, self._by_call)
        assert set(self._by_request.values()) <= set(self._slots.values())
        assert all(number in self._deadlines for number in self._slots)
        assert all(number > self._next_frame for number in self._held)

    def _apply(self, frame: StepFrame, now_s: float) -> None:
        slots = self._slots
        for first in frame.first:
            self._take_first(first, now_s)
        for row in frame.tokens:
            slot = slots.get(row.slot)
            if slot is None or slot.is_over:
                continue
            if row.position != slot.position or not row.token_ids:
                fresh = self._fresh(slot, row, now_s)
                if fresh is not None:
                    self._pass(slot, fresh, now_s)
            else:
                self._pass(slot, row, now_s)
        for final in frame.final:
            self._take_final(final, now_s)
        for error in frame.errors:
            self._take_error(error, now_s)
        if frame.tokens:
            self._sink.on_step(now_s)

    def _pass(self, slot: Slot, row: TokenRow, now_s: float) -> None:
        """Pass the tokens of `row`, which follow those that the sink has."""
        if not slot.has_first:
            self._take_first(FirstRow(slot.number, 0, b""), now_s)
        slot.position += len(row.token_ids)
        if not slot.is_over:  # the sink may have cancelled the call at its first event
            self._sink.on_tokens(slot.call_id, row.token_ids, row.log_probs, now_s, row.alternatives)

    def _take_first(self, row: FirstRow, now_s: float) -> None:
        slot = self._slots.get(row.slot)
        if slot is None or slot.has_first:
            return
        slot.has_first = True
        if not slot.is_over:
            self._sink.on_first(slot.call_id, FirstAnswer(row.handoff, row.reused_blocks), now_s)
        elif row.handoff:
            self._release(row.handoff)

    def _fresh(self, slot: Slot, row: TokenRow, now_s: float) -> TokenRow | None:
        """Return the tokens of `row` that the sink does not have. None: there are none, or the call has failed."""
        count, known = len(row.token_ids), slot.position - row.position
        if not count:
            self._break(
                slot, EngineError(f"slot {slot.number} has a row of 0 tokens: allowed are 1 or more"), now_s
            )
            return None
        if known < 0:
            text = f"slot {slot.number} has tokens at position {row.position}: allowed are 0..{slot.position}"
            self._break(slot, EngineError(text), now_s)
            return None
        if known >= count:
            return None
        width = len(row.alternatives) // count
        return TokenRow(
            row.slot,
            slot.position,
            row.token_ids[known:],
            row.log_probs[known:],
            row.alternatives[known * width :],
        )

    def _take_final(self, row: FinalRow, now_s: float) -> None:
        slot = self._slots.get(row.slot)
        if slot is None:
            return
        if not row.is_complete:
            self._fail(slot, EngineError("the engine's answers ended early"), now_s)
            return
        if not slot.has_first:
            self._take_first(FirstRow(slot.number, 0, b""), now_s)
        was_over = slot.is_over
        self._end(slot)
        if not was_over:
            self._sink.on_end(slot.call_id, now_s)

    def _take_error(self, row: ErrorRow, now_s: float) -> None:
        slot = self._slots.get(row.slot)
        if slot is not None:
            self._fail(slot, errors.of_text(row.text), now_s)

    def _break(self, slot: Slot, error: CallError, now_s: float) -> None:
        """Fail a call that the engine still runs. Its slot is closing afterwards."""
        self.cancel(slot.call_id, now_s)
        self._cancel_slot(slot.number)
        self._sink.on_error(slot.call_id, error, now_s)

    def _fail(self, slot: Slot, error: CallError, now_s: float) -> None:
        """End a slot that the engine does not have any more."""
        self._end(slot)
        self._report(slot, error, now_s)

    def _report(self, slot: Slot, error: CallError, now_s: float) -> None:
        if not slot.is_over:
            slot.is_over = True
            self._sink.on_error(slot.call_id, error, now_s)

    def _end(self, slot: Slot) -> None:
        del self._slots[slot.number]
        if not slot.is_over:
            del self._by_call[slot.call_id]
        if self._by_request.get(slot.call.request_id) is slot:
            del self._by_request[slot.call.request_id]
        self._deadlines.forget(slot.number)
