"""One attached caller: reads its messages in the protocol's order and hands them to the core. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmesh.attach import rules
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb

if TYPE_CHECKING:
    from services.prefill.core import PrefillCore
    from services.prefill.slot import Slot


class PrefillSession:
    """See kvmesh.attach.server.Session. `slots`: those this stream reads, by their number in it."""

    def __init__(self, core: PrefillCore, peer: str, outbox: DownwardOutbox) -> None:
        self.peer = peer
        self.outbox = outbox
        self.slots: dict[int, Slot] = {}
        self._core = core
        self._last_slot = 0

    def __repr__(self) -> str:
        return f"PrefillSession({self.peer}, {len(self.slots)} slots)"

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Apply cancels and submits. Raises FrameError. Adopts are refused; handoffs and credits are not for prefill."""
        for cancel in message.cancels:
            slot = self.slots.get(cancel.slot)
            if slot is not None:
                self._core.cancel(slot, cancel.reason, now_s)
        last = self._last_slot
        for adopt in message.adopts:
            rules.check_adopt(adopt, last_slot=last)
            last = adopt.slot
            self.outbox.refuse(
                adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, "a prefill replica runs nothing to adopt"
            )
        highest, last = last, self._last_slot
        for submit in message.submits:
            rules.check_submit(submit, last_slot=last)
            last = submit.slot
            self._core.submit(self, submit, now_s)
        self._last_slot = max(highest, last)

    def on_closed(self, now_s: float) -> None:
        """The stream is gone: what waits or runs is cancelled, held handoffs are kept for a moment."""
        self._core.close_session(self, now_s)
