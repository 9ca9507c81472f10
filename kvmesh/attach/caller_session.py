"""One attached caller: its messages are checked and applied in the protocol's order. Pure.

The server's half of Attach, shared by decode, prefill and the router. The core decides. Its answers leave through the
outbox of the session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.rules import check_handoff, check_numbers, uneven_credits
from kvmesh.attach.v1 import attach_pb2 as pb

SlotT = TypeVar("SlotT")
"""An attempt as the core keeps it."""


class AttachedCore(ABC, Generic[SlotT]):
    """Decides about the slots of its callers. A role overrides the abstract operations, and the others that it serves.

    `slot` is always a slot that the session reads. Rows for other slots are dropped: those slots have just ended.
    """

    @abstractmethod
    def cancel(self, slot: SlotT, reason: pb.Cancel.Reason.ValueType, now_s: float) -> None:
        """End `slot` at the request of its caller. Nothing is sent for it."""

    @abstractmethod
    def adopt(self, session: CallerSession[SlotT], adopt: pb.Adopt, now_s: float) -> None:
        """Stream takeover: move a running slot to `session`, or refuse."""

    @abstractmethod
    def submit(self, session: CallerSession[SlotT], submit: pb.Submit, now_s: float) -> None:
        """Take or refuse one attempt."""

    @abstractmethod
    def close_session(self, session: CallerSession[SlotT], now_s: float) -> None:
        """Detach or end the slots of `session` after the loss of its stream."""

    def contradict(self, contradiction: pb.Contradiction, now_s: float) -> None:
        """Count a replica's refusal that a second replica contradicted. Ignored by default."""

    def hand_over(self, slot: SlotT, handoff: pb.Handoff, now_s: float) -> None:
        """Start generating from a handoff. Ignored by default. Raises FrameError."""

    def grant(self, slot: SlotT, position: int, now_s: float) -> None:
        """Raise the flow-control window of `slot` to `position`. Ignored by default."""

    def close_window(self, slot: SlotT, now_s: float) -> None:
        """Note that the client's flow-control window is closed. Ignored by default."""

    def after_message(self, now_s: float) -> None:
        """Run once all rows of a message are applied, and after a session closed. Does nothing by default."""


class CallerSession(Generic[SlotT]):
    """A kvmesh.attach.server.Session for one stream.

    INVARIANT: numbers of slots ascend within the stream and are never reused.
    """

    __slots__ = ("_core", "_last_slot", "outbox", "peer", "region", "slots")

    def __init__(
        self, core: AttachedCore[SlotT], peer: str, outbox: DownwardOutbox, region: str = ""
    ) -> None:
        """`peer`: the caller's process id, for logs. `region`: the region of that process; empty: unknown."""
        self.peer = peer
        self.region = region
        self.outbox = outbox
        self.slots: dict[int, SlotT] = {}
        """The slots that this stream reads, by their number in it."""
        self._core = core
        self._last_slot = 0

    def __repr__(self) -> str:
        return f"CallerSession({self.peer}, {len(self.slots)} slots)"

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Apply the rows of `message` in the protocol's order. Raises FrameError.

        The order: cancels, contradictions, adopts, submits, handoffs, credits, closed windows.
        """
        core, slots = self._core, self.slots
        if message.adopts or message.submits:
            self._last_slot = check_numbers(message, last_slot=self._last_slot)
        if len(message.credit_slots) != len(message.credit_positions):
            raise uneven_credits(message)
        for cancel in message.cancels:
            if (slot := slots.get(cancel.slot)) is not None:
                core.cancel(slot, cancel.reason, now_s)
        for contradiction in message.contradictions:
            core.contradict(contradiction, now_s)
        for adopt in message.adopts:
            core.adopt(self, adopt, now_s)
        for submit in message.submits:
            core.submit(self, submit, now_s)
        for handoff in message.handoffs:
            check_handoff(handoff)
            if (slot := slots.get(handoff.slot)) is not None:
                core.hand_over(slot, handoff, now_s)
        for number, position in zip(message.credit_slots, message.credit_positions, strict=True):
            if (slot := slots.get(number)) is not None:
                core.grant(slot, position, now_s)
        for number in message.closed_slots:
            if (slot := slots.get(number)) is not None:
                core.close_window(slot, now_s)
        core.after_message(now_s)

    def on_closed(self, now_s: float) -> None:
        """Hand the slots of the lost stream to the core."""
        self._core.close_session(self, now_s)
        self._core.after_message(now_s)
