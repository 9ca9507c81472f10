"""One attached caller: reads its messages in the protocol's order and hands them to the core. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.rules import check_numbers, uneven_credits
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
        """Apply cancels, adopts, submits, handoffs, credits and closed windows, in this order. Raises FrameError."""
        core = self._core
        if message.adopts or message.submits:
            self._last_slot = check_numbers(message, last_slot=self._last_slot)
        if len(message.credit_slots) != len(message.credit_positions):
            raise uneven_credits(message)
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
        for number in message.closed_slots:
            slot = self.slots.get(number)
            if slot is not None:
                core.close_window(slot, now_s)

    def on_closed(self, now_s: float) -> None:
        """The stream is gone: what waits for a handoff ends, what runs becomes an orphan."""
        self._core.close_session(self, now_s)
