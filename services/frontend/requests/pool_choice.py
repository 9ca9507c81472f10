"""Chooses the pool, and so the model version, of each new request: by the weights of the snapshot, then by availability.

Pure. A weight is advice. A pool without a router that is up and can place is left for another pool that has one: the one
with the largest weight, else any (diversion). This needs no control plane.

INVARIANT: a version that a resume token names wins over each weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kvmesh.pools import DEFAULT_POOL
from kvmesh.snapshot.assignment import Assignment
from kvmesh.snapshot.content import Content, PoolTrack, Track
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.router_peers import Peers

NO_POOLS: Final = Content((PoolTrack(DEFAULT_POOL, "", Track.STABLE, 100),))
"""Content of a mesh without pools, for tests of the core alone. The empty version is any version."""


class ChosenPool(NamedTuple):
    """The pool of one request."""

    pool: str
    model_version: str
    rollout: str = ""
    """Id of the rollout whose weights chose the pool. Empty: no rollout, or another reason."""
    is_diverted: bool = False
    """True if the weights chose another pool, which cannot place."""


ANY_VERSION: Final = ChosenPool(DEFAULT_POOL, "")
"""The pool of a mesh without pools, for tests of the core alone."""


def _share(_: str, __: str) -> bool:
    return True


def _ignore(_: str) -> None:
    return None


class PoolChoice:
    """See the module.

    `share_tokenizer(a, b)` is true if two versions make the same token ids of each prompt. `on_diverted(pool)` is called
    for each new request that `pool`, chosen by weight, cannot place.
    """

    def __init__(
        self,
        peers: Peers[Any],
        content: Content = NO_POOLS,
        share_tokenizer: Callable[[str, str], bool] = _share,
        on_diverted: Callable[[str], None] = _ignore,
    ) -> None:
        self.diverted: Counter[str] = Counter()
        """Requests that went elsewhere, by the pool that the weights chose."""
        self.share_tokenizer = share_tokenizer
        self._peers = peers
        self._on_diverted = on_diverted
        self.take(content)

    def take(self, content: Content) -> None:
        """Put `content` in force."""
        self.content = content
        self._assignment = Assignment(content)
        self._chosen = {
            track.pool: ChosenPool(track.pool, track.model_version, content.rollout)
            for track in content.pools
        }
        self._by_weight = sorted(content.pools, key=lambda track: track.weight_percent, reverse=True)

    @property
    def stable(self) -> str:
        """Name of the stable pool."""
        return self._assignment.stable.pool

    @property
    def has_several(self) -> bool:
        """True if the snapshot or the routers know more than one pool."""
        return len(self._chosen) > 1 or self._peers.has_several_pools

    @property
    def has_router(self) -> bool:
        """True if a router of the stable pool is up, or a router of any pool that can place."""
        stable = self.stable
        return any(peer.link.is_up and (peer.can_place or peer.pool == stable) for peer in self._peers)

    def track(self, pool: str) -> Track:
        """Return the track of `pool`."""
        found = self.content.pool(pool)
        return Track.IDLE if found is None else found.track

    def assigned(self, tenant: str, session: str) -> ChosenPool:
        """Return the pool of `session` by weight alone. `session`: its id, or the request id without one."""
        return self._chosen[self._assignment.choose(tenant, session).pool]

    def choose(self, tenant: str, session: str) -> ChosenPool:
        """Return the pool of a new request of `session`, by weight and availability. Counts a diversion."""
        chosen = self._chosen[self._assignment.choose(tenant, session).pool]
        if self._peers.can_place(chosen.pool, chosen.model_version):
            return chosen
        return self.divert(chosen)

    def divert(self, chosen: ChosenPool) -> ChosenPool:
        """Return a pool that can place, in place of `chosen`, and count the diversion. `chosen` if no pool can place."""
        other = self.other(chosen.pool)
        if other is None:
            return chosen
        self.diverted[chosen.pool] += 1
        self._on_diverted(chosen.pool)
        return other

    def other(self, pool: str, model_version: str = "") -> ChosenPool | None:
        """Return the best pool except `pool` that can place, only of `model_version` if given. None: there is none."""
        for candidate in self._candidates(takes_new=True):
            if (
                candidate.pool != pool
                and model_version in ("", candidate.model_version)
                and self._peers.can_place(candidate.pool, candidate.model_version)
            ):
                return candidate
        return None

    def named(self, pool: str) -> ChosenPool | None:
        """Return the pool of that name, as the snapshot or a router knows it. None: it is unknown."""
        chosen = self._chosen.get(pool)
        if chosen is not None:
            return chosen
        versions = [peer.model_version for peer in self._peers.of_pool(pool)]
        return ChosenPool(pool, versions[0]) if versions else None

    def of_version(self, model_version: str, pool: str = "") -> ChosenPool | None:
        """Return the pool that continues a request of `model_version`, which ran in `pool`. None: no pool has the version.

        `pool` comes first, even while it has no router. Without a name: the pool with the largest weight that can place.
        """
        found = self.named(pool) if pool else None
        if found is not None and found.model_version == model_version:
            return ChosenPool(pool, model_version)
        serving = self.other("", model_version)
        if serving is None:
            every = self._candidates(takes_new=False)
            serving = next((each for each in every if each.model_version == model_version), None)
        return serving._replace(is_diverted=False) if serving is not None else None

    def elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return `spec` for another pool that can place, if its own cannot. None: its own can, or no other can."""
        if not self.has_several or self._peers.can_place(spec.pool, spec.model_version):
            return None
        return _in_pool(spec, self.other(spec.pool))

    def same_version_elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return `spec` for another pool of its version that can place. None: there is none."""
        return _in_pool(spec, self.other(spec.pool, spec.model_version)) if self.has_several else None

    def can_place(self, pool: str, model_version: str) -> bool:
        """True if a router of `pool` that serves `model_version` is up and can place new requests."""
        return self._peers.can_place(pool, model_version)

    def is_stale(self, model_version: str) -> bool:
        """True if no pool can place requests of `model_version`, and a pool can place those of another version."""
        versions = {version for _, version in self._peers.placeable()}
        return bool(versions) and not versions & {"", model_version}

    def _candidates(self, *, takes_new: bool) -> Iterator[ChosenPool]:
        """Yield the snapshot's pools by falling weight, then those of all other routers. `takes_new`: no closed pool."""
        for track in self._by_weight:
            if not (takes_new and track.is_closed):
                yield ChosenPool(track.pool, track.model_version, is_diverted=True)
        for pool, version in self._peers.placeable():
            if pool not in self._chosen:
                yield ChosenPool(pool, version, is_diverted=True)


def _in_pool(spec: RequestSpec, chosen: ChosenPool | None) -> RequestSpec | None:
    if chosen is None:
        return None
    return replace(
        spec, pool=chosen.pool, model_version=chosen.model_version or spec.model_version, rollout=""
    )
