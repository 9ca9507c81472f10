"""One attached caller: reads its messages in the protocol's order and hands them to the core. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvmesh.attach import frames
from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb

if TYPE_CHECKING:
    from services.decode.core import DecodeCore
    from services.decode.slot import Slot

HANDOFF_BYTES_MAX: Final = 1 << 20


class DecodeSession:
    """See kvmesh.attach.server.Session. `slots`: those this stream reads, by their number in it."""

    def __init__(self, core: DecodeCore, peer: str, outbox: DownwardOutbox) -> None:
        self.peer = peer
        self.outbox = outbox
        self.slots: dict[int, Slot] = {}
        self._core = core
        self._last_slot = 0

    def __repr__(self) -> str:
        return f"DecodeSession({self.peer}, {len(self.slots)} slots)"

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Apply cancels, adopts, submits, handoffs and credits, in this order. Raises FrameError."""
        core = self._core
        if message.adopts or message.submits:
            self._check_numbers(message)
        if len(message.credit_slots) != len(message.credit_positions):
            raise FrameError(
                f"credit columns differ in length: slots {len(message.credit_slots)}, "
                f"positions {len(message.credit_positions)}"
            )
        for cancel in message.cancels:
            slot = self.slots.get(cancel.slot)
            if slot is not None:
                core.cancel(slot, now_s)
        for adopt in message.adopts:
            core.adopt(self, adopt, now_s)
        for submit in message.submits:
            core.submit(self, submit, now_s)
        for handoff in message.handoffs:
            if not 0 < len(handoff.context_phase_params) <= HANDOFF_BYTES_MAX:
                size = len(handoff.context_phase_params)
                raise FrameError(
                    f"handoff.context_phase_params has {size} bytes; 1 to {HANDOFF_BYTES_MAX} is allowed"
                )
            slot = self.slots.get(handoff.slot)
            if slot is not None:
                core.hand_over(slot, handoff, now_s)
        for number, position in zip(message.credit_slots, message.credit_positions, strict=True):
            slot = self.slots.get(number)
            if slot is not None:
                core.grant(slot, position, now_s)

    def on_closed(self, now_s: float) -> None:
        """The stream is gone: what waits for a handoff ends, what runs becomes an orphan."""
        self._core.close_session(self, now_s)

    def _check_numbers(self, message: pb.AttachRequest) -> None:
        """Raise FrameError unless adopts and submits, taken together, use only new numbers, each list ascending."""
        last = self._last_slot
        for adopt in message.adopts:
            frames.check_adopt(adopt, last_slot=last)
            last = adopt.slot
        highest, last = last, self._last_slot
        for submit in message.submits:
            frames.check_submit(submit, last_slot=last)
            last = submit.slot
        if message.adopts and message.submits:
            both = {one.slot for one in message.adopts} & {one.slot for one in message.submits}
            if both:
                raise FrameError(f"slot {min(both)} is named by an adopt and a submit")
        self._last_slot = max(highest, last)
