"""The routers a frontend is attached to, and which of them a request goes to.

Pure. Every router can serve every request; a session keeps to one router while that one is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import xxhash

from kvmesh.attach.outbox import UpwardOutbox

Owner = TypeVar("Owner")
"""The request that a slot belongs to."""


class Link(Protocol):
    """What a peer needs of an AttachLink; a simulation brings its own."""

    name: str
    is_up: bool
    outbox: UpwardOutbox
    """Always the current stream's; another object after the stream broke."""


class Peer(Generic[Owner]):
    """One router: its link, and the request of each open slot. Slots are void once the link is lost."""

    __slots__ = ("is_draining", "link", "queue_delay_s", "slots", "step_s")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.slots: dict[int, Owner] = {}
        self.is_draining = False
        """True while its lease says that it takes nothing new."""
        self.queue_delay_s = 0.0
        """What the router said last of how long a new request waits there."""
        self.step_s = 0.0
        """What it said of the time between two tokens that 95 of 100 steps keep; 0: it does not know."""

    def __repr__(self) -> str:
        return f"Peer({self.name}, {'up' if self.link.is_up else 'down'}, {len(self.slots)} slots)"

    @property
    def name(self) -> str:
        """Name of the router in the mesh."""
        return self.link.name

    def open(self, owner: Owner) -> int:
        """Return a new slot whose rows go to `owner`."""
        slot = self.link.outbox.new_slot()
        self.slots[slot] = owner
        return slot

    def close(self, slot: int) -> None:
        """Stop listening to `slot`; may be called twice."""
        self.slots.pop(slot, None)


class Peers(Generic[Owner]):
    """All routers by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer[Owner]] = {}

    def __iter__(self) -> Iterator[Peer[Owner]]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, link: Link) -> Peer[Owner]:
        """Add a router. Its name must be new."""
        assert link.name not in self._by_name, f"router {link.name} is there already"
        peer: Peer[Owner] = Peer(link)
        self._by_name[link.name] = peer
        return peer

    def remove(self, name: str) -> None:
        """Forget a router whose link was lost and stays closed."""
        peer = self._by_name.pop(name)
        assert not peer.slots, f"{peer} still has slots"

    def get(self, name: str) -> Peer[Owner] | None:
        """Return the router of that name."""
        return self._by_name.get(name)

    def choose(self, affinity: str, avoid: str = "") -> Peer[Owner] | None:
        """Return the router for `affinity` among those up, or None if none is.

        Equal affinities go to the same router while it is up; when one goes, only its share moves (rendezvous hashing,
        Thaler and Ravishankar 1998). Draining routers and `avoid` are taken only if no other one is up.
        """
        up = [peer for peer in self._by_name.values() if peer.link.is_up]
        if len(up) < 2:
            return up[0] if up else None
        return min(
            up,
            key=lambda peer: (
                peer.is_draining,
                peer.name == avoid,
                xxhash.xxh3_64_intdigest(f"{peer.name}\n{affinity}".encode()),
            ),
        )

    def has_other(self, name: str) -> bool:
        """True if a router other than `name` is up."""
        return any(peer.link.is_up and peer.name != name for peer in self)
