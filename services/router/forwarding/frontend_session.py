"""One attached frontend: reads its messages in the protocol's order and hands them to the relay. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.rules import check_numbers, uneven_credits
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt

if TYPE_CHECKING:
    from services.router.forwarding.core import ForwardingCore


class FrontendSession:
    """See kvmesh.attach.server.Session. `slots`: the attempts this stream reads, by its own numbers."""

    def __init__(self, relay: ForwardingCore, peer: str, outbox: DownwardOutbox) -> None:
        self.peer = peer
        self.outbox = outbox
        self.slots: dict[int, Attempt] = {}
        self._relay = relay
        self._last_slot = 0

    def __repr__(self) -> str:
        return f"FrontendSession({self.peer}, {len(self.slots)} slots)"

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Apply cancels, contradictions, adopts, submits, credits and closed windows, in this order. Raises FrameError.

        A router takes no handoffs.
        """
        admission, holdings, slots = self._relay.admission, self._relay.holdings, self.slots
        if message.adopts or message.submits:
            self._last_slot = check_numbers(message, last_slot=self._last_slot)
        if len(message.credit_slots) != len(message.credit_positions):
            raise uneven_credits(message)
        for cancel in message.cancels:
            if (item := slots.get(cancel.slot)) is not None:
                admission.cancel(item, cancel.reason, now_s)
        for contradiction in message.contradictions:
            self._relay.contradict(contradiction, now_s)
        for adopt in message.adopts:
            admission.adopt(self, adopt, now_s)
        for submit in message.submits:
            admission.submit(self, submit, now_s)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            item = slots.get(slot)
            if item is not None and (position > item.credit or item.is_window_closed):
                item.credit = max(position, item.credit)
                if item.is_window_closed:
                    holdings.set_window(item, is_closed=False)
                if item.decode.replica is not None:
                    item.decode.replica.outbox.credit(item.decode.slot, item.credit)
        for slot in message.closed_slots:
            if (item := slots.get(slot)) is not None and not item.is_window_closed:
                holdings.set_window(item, is_closed=True)
                if item.decode.replica is not None:
                    item.decode.replica.outbox.close_window(item.decode.slot)
        self._relay.advance(now_s)

    def on_closed(self, now_s: float) -> None:
        """The stream is gone: what waits or is in prefill ends, what runs becomes an orphan."""
        self._relay.close_session(self, now_s)
        self._relay.advance(now_s)
