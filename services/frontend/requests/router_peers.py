"""The routers that a frontend is attached to, by pool, and the choice of a request's router (consistent hashing).

Pure. Every router of a pool can serve every request of that pool's version, and no other request. Session affinity: a
session keeps one router of its pool while that router is up.

A pool of another region is named "region/pool". So a choice by pool never leaves a region, and `RegionChoice` alone crosses
the border.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import xxhash

from kvmesh.attach.outbox import UpwardOutbox
from kvmesh.pools import DEFAULT_POOL
from kvmesh.regions.names import qualified

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

    __slots__ = (
        "can_place",
        "features",
        "is_draining",
        "link",
        "model_version",
        "pool",
        "queue_delay_s",
        "region",
        "slots",
        "step_s",
    )

    def __init__(
        self, link: RouterLink, pool: str = DEFAULT_POOL, model_version: str = "", region: str = ""
    ) -> None:
        self.link = link
        self.slots: dict[int, Owner] = {}
        self.region = region
        """Region of the router. Empty: the own one."""
        self.pool = qualified(region, pool)
        """Pool of the router, by its lease; "region/pool" in another region."""
        self.model_version = model_version
        """Model version that the router serves, by its lease. Empty: any."""
        self.can_place = True
        """False while the router reports that it cannot place new requests. A router of release 0.1.0 reports nothing."""
        self.features: frozenset[str] | None = None
        """Features of sampling that its pool's engines offer, as the router reported on this stream. None: not yet."""
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
        """Name of the router in the mesh, "region/name" in another region."""
        return self.link.name

    @property
    def takes_new(self) -> bool:
        """True if the router is up, does not drain, and can place new requests."""
        return self.can_place and self.link.is_up and not self.is_draining

    def open(self, owner: Owner) -> int:
        """Return a new slot; its rows go to `owner`."""
        slot = self.link.outbox.new_slot()
        self.slots[slot] = owner
        return slot

    def close(self, slot: int) -> None:
        """Ignore further rows of `slot`. Idempotent."""
        self.slots.pop(slot, None)


class Peers(Generic[Owner]):
    """All routers by name, and by pool."""

    def __init__(self) -> None:
        self._by_name: dict[str, Peer[Owner]] = {}
        self._by_pool: dict[str, list[Peer[Owner]]] = {}
        self._by_region: dict[str, list[Peer[Owner]]] = {}
        self._features: dict[str, frozenset[str]] = {}
        """Features by pool, as they were known last."""
        self._own_pools = 0
        """Number of pools of the own region's routers."""

    def __iter__(self) -> Iterator[Peer[Owner]]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def has_several_pools(self) -> bool:
        """True if the own region's routers are of more than one pool."""
        return self._own_pools > 1

    def add(
        self, link: RouterLink, pool: str = DEFAULT_POOL, model_version: str = "", region: str = ""
    ) -> Peer[Owner]:
        """Add a router; its name must be new. `model_version`: empty for a router that serves any version.

        `region`: empty for the own one.
        """
        assert link.name not in self._by_name, f"router {link.name} was added already"
        peer: Peer[Owner] = Peer(link, pool, model_version, region)
        self._by_name[link.name] = peer
        self._by_pool.setdefault(peer.pool, []).append(peer)
        self._by_region.setdefault(region, []).append(peer)
        self._count_pools()
        return peer

    def remove(self, name: str) -> None:
        """Forget a router after its link was lost and stays closed."""
        peer = self._by_name.pop(name)
        assert not peer.slots, f"{peer} still has slots"
        of_pool = self._by_pool[peer.pool]
        of_pool.remove(peer)
        if not of_pool:
            del self._by_pool[peer.pool]
        of_region = self._by_region[peer.region]
        of_region.remove(peer)
        if not of_region:
            del self._by_region[peer.region]
        self._count_pools()

    def _count_pools(self) -> None:
        self._own_pools = len({peer.pool for peer in self._by_region.get("", ())})

    def get(self, name: str) -> Peer[Owner] | None:
        """Return the router of that name."""
        return self._by_name.get(name)

    def of_pool(self, pool: str) -> Sequence[Peer[Owner]]:
        """Return the routers of `pool`, up or down."""
        return self._by_pool.get(pool, ())

    def of_region(self, region: str) -> Sequence[Peer[Owner]]:
        """Return the routers of `region`, up or down. Empty: the own region."""
        return self._by_region.get(region, ())

    def choose(
        self, pool: str, affinity: str, avoid: str = "", *, model_version: str = ""
    ) -> Peer[Owner] | None:
        """Return the router for `affinity` among the routers of `pool` that are up and serve `model_version`, or None.

        Equal affinities go to the same router while it is up. The loss of a router moves only its share (rendezvous
        hashing, Thaler and Ravishankar 1998). Routers that do not drain come first, then routers that can place, then all
        routers but `avoid`.
        """
        up = [
            peer
            for peer in self._by_pool.get(pool, ())
            if peer.link.is_up and peer.model_version in ("", model_version)
        ]
        if len(up) < 2:
            return up[0] if up else None
        return min(
            up,
            key=lambda peer: (
                peer.is_draining,
                not peer.can_place,
                peer.name == avoid,
                xxhash.xxh3_64_intdigest(f"{peer.name}\n{affinity}".encode()),
            ),
        )

    def can_place(self, pool: str, model_version: str = "") -> bool:
        """True if a router of `pool` that serves `model_version` is up and can place new requests."""
        return any(
            peer.takes_new and peer.model_version in ("", model_version)
            for peer in self._by_pool.get(pool, ())
        )

    def features(self, pool: str) -> frozenset[str] | None:
        """Return the features of sampling that all routers of `pool` report that can place requests. None: never known.

        Without such a router it is what was known last: a router that has no replica knows no feature.
        """
        reported = [
            peer.features
            for peer in self._by_pool.get(pool, ())
            if peer.link.is_up and peer.can_place and peer.features is not None
        ]
        if reported:
            self._features[pool] = frozenset.intersection(*reported)
        return self._features.get(pool)

    def missing(self, pool: str, needs: Collection[str]) -> frozenset[str]:
        """Return those of the features `needs` that the engines of `pool` are known to lack."""
        offered = self.features(pool) if needs else None
        return frozenset() if offered is None else frozenset(needs) - offered

    def offers(self, pool: str, needs: Collection[str]) -> bool:
        """False if it is known that the engines of `pool` lack one of the features `needs`."""
        return not self.missing(pool, needs)

    def has_up(self, pool: str, model_version: str = "") -> bool:
        """True if a router of `pool` that serves `model_version` is up, and does not drain."""
        return any(
            peer.link.is_up and not peer.is_draining and peer.model_version in ("", model_version)
            for peer in self._by_pool.get(pool, ())
        )

    def placeable(self) -> Iterator[tuple[str, str]]:
        """Yield pool and model version of each router of the own region that takes new requests; some repeatedly."""
        for peer in self.of_region(""):
            if peer.takes_new:
                yield peer.pool, peer.model_version

    def has_other(self, pool: str, name: str) -> bool:
        """True if a router of `pool` other than `name` is up."""
        return any(peer.link.is_up and peer.name != name for peer in self._by_pool.get(pool, ()))
