"""Chooses the region of each request: the own one, unless spill selects another, or the own one cannot take the request.

Pure. Locality has priority. A request leaves the own region (a) if the shares of spill select its session, or (b) if no own
router can take it and another region's router can. Regions of weight 0 get nothing. This needs no control plane: the last
snapshot holds, and a region without links takes nothing.

INVARIANT: a pinned tenant is served in its regions alone (residency). That wins over weights, spill and availability.
INVARIANT: a guest, whose home is another region, is served in the own region or at its home: nothing is spilled twice.
INVARIANT: a request that is bound to a version keeps it. Another one may take the other region's stable version.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import xxhash

from kvmesh.errors import MeshError
from kvmesh.region_sections import UNNAMED
from kvmesh.regions.lease import LeaseSettings
from kvmesh.regions.names import qualified
from kvmesh.regions.targets import Targets, position
from kvmesh.snapshot.regions import RegionEntry
from kvmesh.tenants.caller import Tenant
from services.frontend.requests import faults
from services.frontend.requests.moved_sessions import MovedSessions
from services.frontend.requests.pool_choice import ChosenPool, PoolChoice
from services.frontend.requests.region_refusals import RegionRefusals
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.router_peers import Peers

SHARE_FLOOR: Final = 0.05
"""Least share of spill by which a region counts as a target of requests that home cannot take."""

DRAWS: Final = 1 << 52
"""Different draws of one score: few enough that each is exact as a float, and below 1 as a share."""

LEASE: Final = LeaseSettings()
"""Decay of shares that are not renewed."""

OWN: Final = ""
"""Name of the own region in pools, links and specs."""


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """Regions of the configuration."""

    own: str = UNNAMED
    names: frozenset[str] = frozenset()
    """All regions, the own one included. Empty: a mesh without regions."""
    may_rebind: bool = True
    """True: a request may take the stable version of another region (`region.other_version`)."""


class RegionChoice:
    """See the module. `serves(version)` is true if this frontend has the tokenizer of a version."""

    def __init__(self, peers: Peers[Any], pools: PoolChoice, settings: RegionSettings) -> None:
        self.settings = settings
        self.serves: Callable[[str], bool] = lambda _: True
        self.spilled: Counter[str] = Counter()
        """Requests that the shares of spill moved, by region."""
        self.failed_over: Counter[str] = Counter()
        """Requests that the region before could not take, by the region that took them."""
        self.other_version: Counter[str] = Counter()
        """Requests that took another model version with another region, by that region."""
        self.grant_refusals: Counter[str] = Counter()
        """Refusals for the grant of the caller's region, by the region that refused."""
        self.guests: Counter[str] = Counter()
        """Requests of guests, by home region."""
        self.unknown_home_total = 0
        """Requests with an unknown home region, which count as own ones."""
        self.sessions = MovedSessions()
        self._peers = peers
        self._pools = pools
        self._entries: dict[str, RegionEntry] = {}
        """Other regions that get load, by name."""
        self._differing: frozenset[str] = frozenset()
        """Regions with other tables of tenants: their residency may be another one."""
        self._versions: frozenset[str] = frozenset()
        """Stable versions of all regions."""
        self._told: Mapping[str, float] = {}
        """Shares as the control plane told them."""
        self._shares: Mapping[str, float] = {}
        """Shares in force."""
        self._renewed_s = float("-inf")
        self._targets: Targets | None = None
        """None: no region has a share of spill."""
        self.refusals = RegionRefusals()
        self._now_s = 0.0
        """Time of the last new request or refusal."""

    def __repr__(self) -> str:
        return (
            f"RegionChoice({self.settings.own}, others {sorted(self._entries)}, shares {dict(self._shares)})"
        )

    # Inputs.

    def take(self, entries: Collection[RegionEntry]) -> None:
        """Take the regions of the snapshot in force, as far as they are configured here."""
        own, names = self.settings.own, self.settings.names
        entries = [each for each in entries if not names or each.name in names]
        self._entries = {each.name: each for each in entries if each.name != own and each.weight_percent > 0}
        self._differing = frozenset(each.name for each in entries if each.tenants_differ)
        stable = {each.stable_version for each in entries if each.weight_percent or each.name == own} - {""}
        self._versions = frozenset(version for version in stable if self.serves(version))
        self._build()

    def take_shares(self, shares: Mapping[str, float], now_s: float) -> None:
        """Take the shares of new sessions that other regions get. Without renewal they age like the grants behind them."""
        self._renewed_s = now_s
        if shares != self._told or self._shares != self._told:
            self._told = self._shares = dict(shares)
            self._build()

    def _age(self, now_s: float) -> None:
        """Lower the shares that no control plane renews: the grants behind them have become smaller (`decayed`)."""
        age_s = now_s - self._renewed_s
        part = 0.0 if age_s >= LEASE.ends_after_s else LEASE.old_share
        shares = {region: share * part for region, share in self._told.items()}
        if shares != self._shares:
            self._shares = shares
            self._build()

    def _build(self) -> None:
        shares = {
            name: share
            for name, share in self._shares.items()
            if share > 0 and name in self._entries and name not in self._differing
        }
        # Places of regions without weight stay free: otherwise the sessions of all others would move.
        others = self.settings.names - {self.settings.own} | self._entries.keys()
        self._targets = Targets(OWN, sorted(others), shares) if shares else None

    # Callers.

    @property
    def has_others(self) -> bool:
        """True if another region gets load."""
        return bool(self._entries)

    @property
    def takes_new(self) -> bool:
        """True if a router of another region that gets load takes new requests."""
        return any(peer.takes_new for region in self._entries for peer in self._peers.of_region(region))

    @property
    def border(self) -> str:
        """Name of the own region in resume tokens. Empty: a mesh without regions."""
        return self.settings.own if self.settings.names else ""

    def home_of(self, told: str) -> str:
        """Return the home region of a caller, from its header. Empty: a mesh without regions."""
        if not self.settings.names:
            return ""
        if told and told not in self.settings.names:
            self.unknown_home_total += 1
            return self.settings.own
        if told and told != self.settings.own:
            self.guests[told] += 1
        return told or self.settings.own

    def check(self, tenant: Tenant) -> None:
        """Raise MeshError (REGION_UNAVAILABLE) if the tenant may not be served here, before its prompt is read."""
        if tenant.regions and self.settings.own not in tenant.regions:
            raise faults.region_unavailable(tenant.regions)

    def refusal(self, spec: RequestSpec) -> MeshError | None:
        """Return the error of a request that no region could take which may: it is pinned, or a guest. Else None."""
        pinned = spec.caller.tenant.regions
        if not self.settings.names or not (pinned or self._is_guest(spec.home)):
            return None
        return faults.region_unavailable(pinned)

    def _is_guest(self, home: str) -> bool:
        return home not in ("", self.settings.own)

    def _may_use(self, region: str, tenant: Tenant, home: str) -> bool:
        """True if `region` may serve the tenant's request. The invariants of the module, for one region."""
        if tenant.regions and (region or self.settings.own) not in tenant.regions:
            return False
        if region == OWN:
            return True
        if tenant.regions and region in self._differing:
            return False
        return region == home or not self._is_guest(home)

    # New requests.

    def may_send(self, region: str, tenant: Tenant, home: str) -> bool:
        """True if another region gets load, and may serve a request of the tenant."""
        return region in self._entries and self._may_use(region, tenant, home)

    def choose(
        self,
        tenant: Tenant,
        session: str,
        home: str,
        now_s: float,
        *,
        is_session: bool = True,
        without: Collection[str] = (),
        model: str = "",
    ) -> ChosenPool:
        """Return region and pool of a new request. `is_session`: `session` is no request id, so it will come again.

        `without`: regions that it left already. The own one remains the last resort. `model`: empty for the default one.
        """
        if not self._entries:
            return self._pools.choose(tenant.name, session, model)
        self._now_s = now_s
        self.refusals.on_request()
        chosen = self._pools.assigned(tenant.name, session, model)
        if not without and (self._targets is not None or self.sessions):
            there = self._spilled(chosen, tenant, session, home, now_s, is_session=is_session)
            if there is not None:
                return there
        if OWN not in without:
            if not self._pools.cannot_place(*chosen[:2]):
                return chosen
            diverted = self._pools.divert(chosen, tenant.name)
            if diverted is not chosen:
                return diverted
        return self._best(chosen, tenant, session, home, without) or chosen

    def of_version(self, model_version: str, tenant: Tenant, home: str, session: str) -> ChosenPool | None:
        """Return a pool of another region that has `model_version` and takes new work. None: there is none."""
        for region in self._others(tenant, home, session):
            there = self._there(region, model_version, may_rebind=False)
            if there is not None:
                return there
        return None

    def resumed(
        self, region: str, pool: str, model_version: str, tenant: Tenant, home: str
    ) -> ChosenPool | None:
        """Return the pool of `region` where the attempt of a resume token runs. None: it cannot be taken over there."""
        if not self._may_use(region, tenant, home):
            return None
        name = qualified(region, pool)
        return ChosenPool(name, model_version) if self._peers.has_up(name, model_version) else None

    def _spilled(
        self, chosen: ChosenPool, tenant: Tenant, session: str, home: str, now_s: float, *, is_session: bool
    ) -> ChosenPool | None:
        if self._targets is not None and now_s - self._renewed_s >= LEASE.full_for_s:
            self._age(now_s)
        if self._targets is None:
            self.sessions.expire(now_s)
        if self._is_guest(home):
            return None
        at = position(tenant.name, session)
        region = self.sessions.region(at, now_s)
        is_moved = bool(region)
        if not region and self._targets is not None:
            region = self._targets.choose(at, tenant.regions or None)
        if not region or region not in self._entries or region in self._differing:
            return None
        if self.refusals.is_resting(region, now_s) or (not is_moved and self.refusals.is_full(region)):
            return None
        if not self._may_use(region, tenant, home):
            return None
        there = self._there(region, chosen.model_version)
        if there is None:
            return None
        if is_session:
            self.sessions.note(at, region, now_s)
        self.spilled[region] += 1
        self.other_version[region] += there.model_version != chosen.model_version
        return there

    def _best(
        self, chosen: ChosenPool, tenant: Tenant, session: str, home: str, without: Collection[str]
    ) -> ChosenPool | None:
        for region in self._others(tenant, home, session):
            there = self._there(region, chosen.model_version) if region not in without else None
            if there is not None:
                self.failed_over[region] += 1
                self.other_version[region] += there.model_version != chosen.model_version
                return there
        return None

    # Admitted requests.

    def elsewhere(
        self, spec: RequestSpec, *, may_rebind: bool, without: Collection[str] = ()
    ) -> RequestSpec | None:
        """Return `spec` for another region that takes new work, if its own cannot place it, or has weight 0. See `away`."""
        region = spec.region
        if region == OWN and not self._entries:
            return None
        is_out = region != OWN and region not in self._entries
        if not is_out and not self._pools.cannot_place(spec.pool, spec.model_version):
            return None
        return self.away(spec, may_rebind=may_rebind, without=without)

    def away(
        self, spec: RequestSpec, *, may_rebind: bool, without: Collection[str] = ()
    ) -> RequestSpec | None:
        """Return `spec` for the best region except its own that takes new work, the own region of the frontend first.

        `may_rebind`: it may take another model version. `without`: regions that refused it.
        """
        here, tenant, home = spec.region, spec.caller.tenant, spec.home
        needs = spec.sampling.needs().keys()
        if here != OWN and OWN not in without and self._may_use(OWN, tenant, home):
            chosen = self._at_home(spec, may_rebind=may_rebind)
            if chosen is not None:
                return _in_pool(spec, chosen)
        for region in self._others(tenant, home, spec.affinity):
            if region != here and region not in without:
                there = self._there(region, spec.model_version, may_rebind=may_rebind, needs=needs)
                if there is not None:
                    return _in_pool(spec, there)
        return None

    def note_move(self, spec: RequestSpec, model_version: str) -> None:
        """Count a request that came to the region of `spec` from another region, with `model_version` before."""
        region = spec.region or self.settings.own
        self.failed_over[region] += 1
        self.other_version[region] += spec.model_version != model_version

    def note_refused(self, spec: RequestSpec, now_s: float, *, is_grant: bool) -> None:
        """Note that the region of `spec` refused it for lack of capacity (`region_refusals`). Its session is forgotten."""
        region, self._now_s = spec.region, now_s
        self.grant_refusals[region or self.settings.own] += is_grant
        if region:
            self.sessions.forget(position(spec.caller.tenant.name, spec.affinity))
            self.refusals.on_refusal(region, now_s, is_grant=is_grant)

    def may_change_version(self, model_version: str) -> bool:
        """True if the stable version of a region differs, so that a move between regions may change the version."""
        others = (each for each in self._versions if self._pools.models.share(each, model_version))
        return self.settings.may_rebind and any(each != model_version for each in others)

    def is_stale(self, spec: RequestSpec) -> bool:
        """True if a region that may serve `spec` takes new work, and none takes its version."""
        if not self._entries:
            return False
        regions = [OWN, *self._others(spec.caller.tenant, spec.home, spec.affinity)]
        versions = {
            peer.model_version
            for region in regions
            for peer in self._peers.of_region(region)
            if peer.takes_new and self._pools.models.share(peer.model_version, spec.model_version)
        }
        return bool(versions) and not versions & {"", spec.model_version}

    # Pools of regions.

    def _at_home(self, spec: RequestSpec, *, may_rebind: bool) -> ChosenPool | None:
        """Return the own region's pool for a request that another region has. None: it cannot place."""
        name, needs = spec.caller.tenant.name, spec.sampling.needs().keys()
        if may_rebind:
            assigned = self._pools.assigned(name, spec.affinity, self._pools.models.of(spec.model_version))
            if self._pools.can_place(*assigned[:2]) and self._peers.offers(assigned.pool, needs):
                return assigned
            return self._pools.other(assigned, name, needs=needs)
        return self._pools.other(ChosenPool("", spec.model_version), name, is_of_version=True, needs=needs)

    def _there(
        self, region: str, model_version: str, *, may_rebind: bool = True, needs: Collection[str] = ()
    ) -> ChosenPool | None:
        """Return the pool of another region for a request of `model_version`. None: it takes no such request.

        `needs`: features of engines; a pool that is known to lack one is not taken.

        The version is kept if the region serves it, in its stable pool if that has it. Else it is the region's stable one.
        """
        entry = self._entries[region]
        pools = {
            peer.pool
            for peer in self._peers.of_region(region)
            if peer.takes_new
            and peer.model_version in ("", model_version)
            and self._peers.offers(peer.pool, needs)
        }
        stable = qualified(region, entry.stable_pool)
        if pools:
            return ChosenPool(stable if stable in pools else min(pools), model_version, is_diverted=True)
        version = entry.stable_version
        if not (may_rebind and self.settings.may_rebind and version and self.serves(version)):
            return None
        if not self._pools.models.share(version, model_version):
            return None
        if not (self._peers.can_place(stable, version) and self._peers.offers(stable, needs)):
            return None
        return ChosenPool(stable, version, is_diverted=True)

    def _others(self, tenant: Tenant, home: str, session: str) -> Iterator[str]:
        """Yield the other regions that may serve the tenant: weighted rendezvous hashing, so a session keeps its region.

        Regions that refused a request lately come last.
        """
        if len(self._entries) == 1:
            regions = list(self._entries)
        else:
            regions = sorted(self._entries, key=lambda region: self._place(region, tenant, session))
        yield from (region for region in regions if self._may_use(region, tenant, home))

    def _place(self, region: str, tenant: Tenant, session: str) -> tuple[bool, float]:
        return self.refusals.is_last(region, self._now_s), -self._score(region, tenant, session)

    def _score(self, region: str, tenant: Tenant, session: str) -> float:
        weight = self._entries[region].weight_percent * max(self._shares.get(region, 0.0), SHARE_FLOOR)
        drawn = xxhash.xxh3_64_intdigest(f"{region}\0{tenant.name}\0{session}".encode()) >> 12
        return -weight / math.log((drawn + 0.5) / DRAWS)


def _in_pool(spec: RequestSpec, chosen: ChosenPool) -> RequestSpec:
    return replace(
        spec, pool=chosen.pool, model_version=chosen.model_version or spec.model_version, rollout=""
    )
