"""The slot that a live request has open at a router, if it has one.

Pure: rows go to the outbox of the router's link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvmesh.attach.v1 import attach_pb2 as attach
from services.frontend.peers import Peer

if TYPE_CHECKING:
    from services.frontend.request import LiveRequest

CancelReason: TypeAlias = attach.Cancel.Reason.ValueType


class Attachment:
    """At most one slot of one router. Invariant: a slot that is open is in its peer's table."""

    __slots__ = ("peer", "slot")

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.slot = 0

    def __repr__(self) -> str:
        return f"{self.peer.name}/{self.slot}" if self.peer is not None else "nowhere"

    def open(self, peer: Peer, request: LiveRequest) -> int:
        """Open a slot at `peer` whose rows go to `request`; return its number."""
        assert self.peer is None, f"{request} has a slot already"
        self.peer, self.slot = peer, peer.open(request)
        return self.slot

    def credit(self, position: int) -> None:
        """Let tokens below `position` come. A slot must be open."""
        assert self.peer is not None
        self.peer.link.outbox.credit(self.slot, position)

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the slot, if one is open, and stop listening to it."""
        if self.peer is not None:
            self.peer.link.outbox.cancel(self.slot, reason)
            self.detach()

    def detach(self) -> str:
        """Stop listening to the slot; return its router's name."""
        peer, self.peer = self.peer, None
        if peer is None:
            return ""
        peer.close(self.slot)
        return peer.name

    def void(self) -> None:
        """The stream of the slot broke: nothing of it is there any more."""
        self.peer = None
