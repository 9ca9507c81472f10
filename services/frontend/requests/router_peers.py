"""The routers that a frontend is attached to, and the choice of a request's router (consistent hashing).

Pure. Every router can serve every request. Session affinity: a session keeps one router while that router is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import xxhash

from kvmesh.attach.outbox import UpwardOutbox

Owner = TypeVar("Owner")
"""The request that owns a slot."""


class RouterLink(Protocol):
    """The part of an AttachLink that a peer uses; a simulation has its own."""

    name: str
    is_up: bool
    outbox: UpwardOutbox
    """Outbox of the current stream; another object after the stream broke."""


class Peer(Generic[Owner]):
    """One router: its link, and the request of each open slot. Slots are void once the link is lost."""

    __slots__ = ("is_draining", "link", "queue_delay_s", "slots", "step_s")

    def __init__(self, link: RouterLink) -> None:
        self.link = link
        self.slots: dict[int, Owner] = {}
        self.is_draining = False
        """True while the router's lease says that it takes no new requests."""
        self.queue_delay_s = 0.0
        """Queue delay of a new request, as the router reported last."""
        self.step_s = 0.0
        """Inter-token latency (p95 of steps), as the router reported last; 0: unknown."""

    def __repr__(self) -> str:
        return f"Peer({self.name}, {'up' if self.link.is_up else 'down'}, {len(self.slots)} slots)"

    @property
    def name(self) -> str:
        """Name of the router in the mesh."""
        return self.link.name

    def open(self, owner: Owner) -> int:
        """Return a new slot; its rows go to `owner`."""
        slot = self.link.outbox.new_slot()
        self.slots[slot] = owner
        return slot

    def close(self, slot: int) -> None:
        """Ignore further rows of `slot`. Idempotent."""
        self.slots.pop(slot, None)


class Peers(Generic[Owner]):
    """All routers by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer[Owner]] = {}

    def __iter__(self) -> Iterator[Peer[Owner]]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, link: RouterLink) -> Peer[Owner]:
        """Add a router; its name must be new."""
        assert link.name not in self._by_name, f"router {link.name} was added already"
        peer: Peer[Owner] = Peer(link)
        self._by_name[link.name] = peer
        return peer

    def remove(self, name: str) -> None:
        """Forget a router after its link was lost and stays closed."""
        peer = self._by_name.pop(name)
        assert not peer.slots, f"{peer} still has slots"

    def get(self, name: str) -> Peer[Owner] | None:
        """Return the router of that name."""
        return self._by_name.get(name)

    def choose(self, affinity: str, avoid: str = "") -> Peer[Owner] | None:
        """Return the router for `affinity` among those that are up, or None.

        Equal affinities go to the same router while it is up. The loss of a router moves only its share (rendezvous
        hashing, Thaler and Ravishankar 1998). Routers that do not drain come first; among equals, all routers but `avoid`.
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
