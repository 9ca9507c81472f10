"""Chooses the pool, and so the model version, of each new request: by the weights of the snapshot, then by availability.

Pure. A weight is advice. A pool without a router that is up and can place is left for another pool that has one
(diversion): the one with the largest weight, then one of the same version, then the first by name. This needs no control
plane.

INVARIANT: a request stays with its model. INVARIANT: a version that a resume token names wins over each weight.
INVARIANT: no diversion takes a tenant that may not leave stable to canary or baseline. Such a request waits for its pool
instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kvmesh.pools import DEFAULT_POOL
from kvmesh.snapshot.assignment import Assignment
from kvmesh.snapshot.content import Content, PoolTrack, Track
from services.frontend.requests.models import ONE_MODEL, Models
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.router_peers import Peers

NO_POOLS: Final = Content((PoolTrack(DEFAULT_POOL, "", Track.STABLE, 100),))
"""Content of a mesh without pools, for tests of the core alone. The empty version is any version."""


class ChosenPool(NamedTuple):
    """The pool of one request."""

    pool: str
    model_version: str
    rollout: str = ""
    """Id of the rollout whose weights chose the pool. Empty: no rollout, a tenant outside it, or another reason."""
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
        self.may_divert = True
        """False while the frontend starts: a pool without a router may have one that was not found yet."""
        self.share_tokenizer = share_tokenizer
        self._models: Models = ONE_MODEL
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
        self._is_restricted = bool(content.only_tenants or content.never_tenants)
        self._foreign = self._of_other_models()
        self._of_rollout = frozenset(
            track.pool for track in content.pools if track.track in (Track.CANARY, Track.BASELINE)
        )

    @property
    def stable(self) -> str:
        """Name of the stable pool."""
        return self._assignment.stable.pool

    @property
    def models(self) -> Models:
        """The models of the configuration."""
        return self._models

    @models.setter
    def models(self, models: Models) -> None:
        self._models = models
        self._foreign = self._of_other_models()

    @property
    def default_model(self) -> str:
        """Model of a request that names none: that of the stable pool."""
        return self.models.of(self._assignment.stable.model_version)

    @property
    def has_several(self) -> bool:
        """True if the snapshot or the routers know more than one pool."""
        return len(self._chosen) > 1 or self._peers.has_several_pools

    @property
    def has_router(self) -> bool:
        """True if a router of the own region is up that can place, or any router of its stable pool."""
        stable, own = self.stable, self._peers.of_region("")
        return any(peer.link.is_up and (peer.can_place or peer.pool == stable) for peer in own)

    @property
    def unfound(self) -> list[str]:
        """Names of the pools without a router that is up and stays: of the stable pool, and of those with a weight."""
        stable = self.stable
        return [
            track.pool
            for track in self.content.pools
            if (track.weight_percent or track.pool == stable)
            and not self._peers.has_up(track.pool, track.model_version)
        ]

    def track(self, pool: str) -> Track:
        """Return the track of `pool`."""
        found = self.content.pool(pool)
        return Track.IDLE if found is None else found.track

    def assigned(self, tenant: str, session: str, model: str = "") -> ChosenPool:
        """Return the pool of `session` by weight alone. `session`: its id, or the request id without one.

        `model`: empty for the default one. Another model has no weights: its first pool that can place.
        """
        if model and model != self.default_model:
            return self._of_model(model)
        pool = self._assignment.choose(tenant, session).pool
        chosen = self._chosen[self.stable if pool in self._foreign else pool]
        if self._is_restricted and not self._assignment.may_leave(tenant):
            return chosen._replace(rollout="")
        return chosen

    def choose(self, tenant: str, session: str, model: str = "") -> ChosenPool:
        """Return the pool of a new request of `session`, by weight and availability. Counts a diversion."""
        chosen = self.assigned(tenant, session, model)
        return self.divert(chosen, tenant) if self.cannot_place(*chosen[:2]) else chosen

    def divert(self, chosen: ChosenPool, tenant: str) -> ChosenPool:
        """Return a pool that can place, in place of `chosen`, and count the diversion.

        `chosen` if no pool that `tenant` may use can place.
        """
        other = self.other(chosen, tenant)
        if other is None:
            return chosen
        self.diverted[chosen.pool] += 1
        self._on_diverted(chosen.pool)
        return other

    def other(
        self,
        chosen: ChosenPool,
        tenant: str,
        *,
        is_of_version: bool = False,
        needs: Collection[str] = (),
    ) -> ChosenPool | None:
        """Return the best pool except `chosen` that can place and that `tenant` may use. None: there is none.

        `is_of_version`: only of the version of `chosen`. `needs`: features of engines, which a pool may be known to lack.
        """
        for candidate in self._candidates(chosen.model_version, takes_new=True):
            if (
                candidate.pool != chosen.pool
                and (not is_of_version or candidate.model_version == chosen.model_version)
                and self._may_use(tenant, candidate.pool)
                and self._peers.can_place(candidate.pool, candidate.model_version)
                and self._peers.offers(candidate.pool, needs)
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

    def of_version(self, model_version: str, tenant: str, pool: str = "") -> ChosenPool | None:
        """Return the pool that continues a request of `model_version`, which ran in `pool`. None: no pool has the version.

        `pool` comes first, even while it has no router. Without a name: the best pool that can place. If no pool that
        `tenant` may use has the version, it is a pool of the rollout.
        """
        found = self.named(pool) if pool else None
        if found is not None and found.model_version == model_version:
            return ChosenPool(pool, model_version)
        serving = self.other(ChosenPool("", model_version), tenant, is_of_version=True)
        if serving is None:
            every = self._candidates(model_version, takes_new=False)
            same = [each for each in every if each.model_version == model_version]
            serving = min(same, key=lambda each: not self._may_use(tenant, each.pool), default=None)
        return serving._replace(is_diverted=False) if serving is not None else None

    def elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return `spec` for another pool that can place, if its own cannot. None: its own can, or no other can."""
        if not (self.has_several and self.cannot_place(spec.pool, spec.model_version)):
            return None
        name, needs = spec.caller.tenant.name, spec.sampling.needs().keys()
        return _in_pool(spec, self.other(_pool_of(spec), name, needs=needs))

    def same_version_elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return `spec` for another pool of its version that can place. None: there is none."""
        if not self.has_several:
            return None
        name, needs = spec.caller.tenant.name, spec.sampling.needs().keys()
        return _in_pool(spec, self.other(_pool_of(spec), name, is_of_version=True, needs=needs))

    def can_place(self, pool: str, model_version: str) -> bool:
        """True if a router of `pool` that serves `model_version` is up and can place new requests."""
        return self._peers.can_place(pool, model_version)

    def cannot_place(self, pool: str, model_version: str) -> bool:
        """True if it is certain that `pool` cannot place. While the frontend starts, a router of it must say so."""
        return not (self._peers.can_place(pool, model_version) or self.is_sought(pool, model_version))

    def is_sought(self, pool: str, model_version: str) -> bool:
        """True while the frontend starts, and has found no router of `pool` that is up and does not drain."""
        return not (self.may_divert or self._peers.has_up(pool, model_version))

    def is_stale(self, spec: RequestSpec) -> bool:
        """True if no pool can place the version of `spec`, and a pool that its tenant may use can place another one."""
        if not self.may_divert:
            return False
        tenant = spec.caller.tenant.name
        versions = {
            version
            for pool, version in self._peers.placeable()
            if self._may_use(tenant, pool) and self._fits(version, spec.model_version)
        }
        return bool(versions) and not versions & {"", spec.model_version}

    def _of_other_models(self) -> frozenset[str]:
        """Return the pools with another model than the stable one. A snapshot of an older configuration may weight them."""
        stable = self._assignment.stable.model_version
        tracks = self.content.pools
        return frozenset(each.pool for each in tracks if not self._models.share(each.model_version, stable))

    def _of_model(self, model: str) -> ChosenPool:
        """Return the first pool of a model that can place, else its first pool."""
        pools = [ChosenPool(*each) for each in self.models.pools(model)]
        assert pools, f"model {model} has no pool"
        return next((each for each in pools if self._peers.can_place(*each[:2])), pools[0])

    def _may_use(self, tenant: str, pool: str) -> bool:
        """True unless `pool` is canary or baseline and `tenant` may not leave stable."""
        return pool not in self._of_rollout or self._assignment.may_leave(tenant)

    def _candidates(self, model_version: str, *, takes_new: bool) -> Iterator[ChosenPool]:
        """Yield the snapshot's pools, then those of all other routers. `takes_new`: no closed pool.

        The order is by falling weight, then pools of `model_version` first, then by name.
        """
        for track in sorted(
            self.content.pools,
            key=lambda each: (-each.weight_percent, each.model_version != model_version, each.pool),
        ):
            if not (takes_new and track.is_closed) and self._fits(track.model_version, model_version):
                yield ChosenPool(track.pool, track.model_version, is_diverted=True)
        unknown = {each for each in self._peers.placeable() if each[0] not in self._chosen}
        for pool, version in sorted(unknown, key=lambda each: (each[1] not in ("", model_version), each)):
            if self._fits(version, model_version):
                yield ChosenPool(pool, version, is_diverted=True)

    def _fits(self, version: str, wanted: str) -> bool:
        """True if a request of version `wanted` may go to `version`. Empty: any version."""
        return not version or not wanted or self.models.share(version, wanted)


def _pool_of(spec: RequestSpec) -> ChosenPool:
    return ChosenPool(spec.pool, spec.model_version)


def _in_pool(spec: RequestSpec, chosen: ChosenPool | None) -> RequestSpec | None:
    if chosen is None:
        return None
    return replace(
        spec, pool=chosen.pool, model_version=chosen.model_version or spec.model_version, rollout=""
    )
