"""Regions at one control process: news in, snapshot entries and region traffic out. Pure.

`controlplane.regions` decides. Only a leader takes and sends news. A new leader begins with the snapshot in force and the
desired document, so weights stay as they were until peers are heard.

INVARIANT: nothing here changes another region. INVARIANT: secrets of resume tokens are in no view and in no snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from controlplane.actions import AppendEvent, Steer
from controlplane.pools.registry import Registry, is_in_use
from controlplane.regions import grants as granting
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import AvoidEntry, RegionOrders
from controlplane.regions.measuring import OwnSignals
from controlplane.regions.news import DeclaredNews, News, RolloutNews
from controlplane.regions.observed import State
from controlplane.regions.orders import OrderRefused, drained
from controlplane.regions.overrides import OverrideExchange
from controlplane.regions.regions import Regions
from controlplane.regions.settings import RegionSettings
from controlplane.regions.shares import Limits
from controlplane.regions.signals import Signals
from controlplane.regions.views import View as StateView
from controlplane.snapshots.receivers import Receiver, Receivers
from kvmesh.control.v1 import region_pb2 as region_pb
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.regions.quantity import NOTHING, Quantity
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.regions import (
    PERMILLE,
    PROCESSES_MAX,
    ObservedState,
    RegionEntry,
    RegionProcess,
)
from kvmesh.snapshot.regions import DeclaredState as PublishedState

STALE_S: Final = 10.0
"""Age of the last news from which an entry is marked as stale."""

UNKNOWN_S: Final = 5.0
"""Time without any frontend and router after which a region counts as idle. A new leader hears of them within a second."""

SEEDED_TOLD_S: Final = 60.0
"""Time for which the end of a seeding is told to its source."""

STEP_S: Final = 1.0
"""Time between two decisions, and between two messages to frontends and routers."""


@dataclass(slots=True)
class Peer:
    """Another region as its news describe it."""

    entry: RegionEntry
    """Its processes and its stable version, as last heard or published."""
    news: News | None = None
    heard_s: float = float("-inf")
    stale_total: int = 0
    """News that were ignored, because later ones had arrived."""


@dataclass(frozen=True, slots=True)
class RegionNames:
    """Configured facts of a region's control plane."""

    own: str
    shares: Mapping[str, float]
    """Share of the tenants' limits by region, of all regions. The shares sum to 1."""
    limits: Limits = Limits.BORROW
    tenants_sha256: bytes = b""


@dataclass(slots=True)
class _Due:
    """Times of the next work."""

    measure_s: float = float("-inf")
    step_s: float = float("-inf")
    sequence: int = 0
    """Number of the last measurement in this term, and of its news."""


class RegionControl:
    """See the module. `step` is called by the core while it leads; `forget` when it follows again."""

    def __init__(
        self, names: RegionNames, wall: Callable[[], float], settings: RegionSettings | None = None
    ) -> None:
        """`wall` returns Unix time."""
        self.own = names.own
        self.secrets: dict[str, tuple[bytes, ...]] = {}
        """Secrets of resume tokens by region, those of other regions from their news."""
        self.rollout: RolloutNews | None = None
        """The running rollout of the own region, else its last one."""
        self.busy: Mapping[str, int | None] | None = None
        """Own frontends and routers that serve requests, of own callers or of guests. None: no process is known."""
        self.overrides = OverrideExchange()
        self.settings = settings or RegionSettings()
        self._names = names
        self._wall = wall
        self._actions: list[AppendEvent | Steer] = []
        self._begin()

    def _begin(self) -> None:
        names = self._names
        self.regions = Regions(
            names.own, names.shares, self.settings, shares=names.shares, limits=names.limits
        )
        self._peers = {name: Peer(RegionEntry(name)) for name in self.regions.targets}
        self._seeded_s: dict[str, float] = {}
        """Time of the last replay of each other region's hot prompts here."""
        self._measuring = OwnSignals()
        self._signals: Signals | None = None
        self._processes: dict[str, tuple[RegionProcess, ...]] = {}
        self.unaware_count = 0
        """Frontends and routers of a release that knows no regions. They serve at home alone."""
        self._stable = ("", "")
        self._orders = RegionOrders()
        self._due = _Due()
        self._overdue_s = 0.0
        """Expected end of the drain that was noted as overdue, in Unix time. 0: none."""
        self._news: News | None = None
        """News of the last measurement. Two streams to a peer carry the same, which counts once."""
        self._heard_s: float | None = None
        """Time at which a frontend or a router was known last, else that of the first look. None: there was no look yet."""
        self.is_begun = False
        """True once the term knows what was in force before it."""

    def forget(self) -> None:
        """Forget what a term knew: this process follows."""
        self._begin()

    # Events.

    def begin_term(self, content: Content, orders: RegionOrders, now_s: float) -> None:
        """Begin with the snapshot in force and the written orders. Idempotent within a term."""
        if self.is_begun:
            return
        self.is_begun = True
        for entry in content.regions:
            peer = self._peers.get(entry.name)
            if peer is not None:
                if peer.news is None:
                    peer.entry = entry
                if entry.observed is not ObservedState.UNKNOWN:
                    state, reason = State[entry.observed.name], "as the snapshot says that was in force"
                    if state is State.OUT and self._is_avoid_over(orders.avoids.get(entry.name)):
                        state, reason = State.RECOVERING, "the order to avoid it ended"
                    self.regions.on_observed(entry.name, state, entry.weight_percent, reason, now_s)
        self.take_orders(orders, now_s)
        self.regions.take_events()  # of an earlier term, which has written them down

    def take_orders(self, orders: RegionOrders, now_s: float) -> None:
        """Take the written declarations and avoid orders, after each change of the desired document."""
        wall_s = self._wall()
        for region, declared in orders.declared.items():
            self.regions.on_declared(region, declared, max(0.0, wall_s - declared.at_s), now_s)
        for region in self.regions.targets:
            entry, before = orders.avoids.get(region), self._orders.avoids.get(region)
            if entry != before and (entry is None or wall_s < entry.until_s):
                self.regions.on_avoid(region, entry.order(now_s, wall_s) if entry else None, now_s)
        self._orders = orders

    def on_news(self, news: News, now_s: float) -> bool:
        """Take news of another region. False: they are ignored, as old ones or as those of an unknown region.

        A leader that takes over knows nothing of its region yet, and no signals. What the leader before it told holds.
        """
        peer = self._peers.get(news.region)
        if peer is None or news.signals is None:
            return False
        if peer.news is not None and news.order <= peer.news.order and not self._is_stale(peer, now_s):
            peer.stale_total += 1
            return False
        peer.news, peer.heard_s = news, now_s
        peer.entry = RegionEntry(
            news.region,
            routers=news.routers,
            frontends=news.frontends,
            stable_version=news.stable_version,
            stable_pool=news.stable_pool,
            tenants_differ=_differ(news.tenants_sha256, self._names.tenants_sha256),
        )
        if news.secrets:
            self.secrets[news.region] = news.secrets
        self.overrides.learn(news.overrides)
        for each in news.declared:
            self.regions.on_declared(each.region, each.declared, each.age_s, now_s)
            if each.region == news.region:
                self.regions.on_age(each.region, each.declared, each.age_s, now_s)
        self.regions.on_signals(news.region, news.signals, now_s)
        self.regions.on_grant(news.region, news.grants.get(self.own, NOTHING), now_s)
        if self.own in news.seeded_from:
            self.regions.on_seeded(news.region)
        return True

    def on_seeded_here(self, source: str, now_s: float) -> None:
        """Note that the own replicas have replayed hot prompts of another region, to tell it."""
        self._seeded_s[source] = now_s

    def set_own_secrets(self, secrets: tuple[bytes, ...]) -> None:
        """Take the secrets with which the own frontends sign, the present one first."""
        self.secrets[self.own] = secrets

    # Decisions.

    def step(self, registry: Registry, receivers: Receivers, content: Content, now_s: float) -> None:
        """Measure the own region, decide, and tell frontends and routers."""
        if now_s < self._due.step_s:
            return
        self._due.step_s = now_s + STEP_S
        self._stable = (content.stable.pool, content.stable.model_version)
        self._processes = _processes(registry.ordered(), content)
        self.unaware_count = sum(
            not each.region for each in registry.ordered() if each.role in self._processes
        )
        if now_s >= self._due.measure_s:
            self._due.measure_s = now_s + self.settings.signals_every_s
            self._measure(registry, receivers, content, now_s)
        self._probe(receivers, now_s)
        self.regions.step(now_s)
        for event in self.regions.take_events():
            self._actions.append(AppendEvent(event.what, event.region, event.reason))
        self._warn_overdue()
        self._steer(receivers)

    def wanted_orders(self, orders: RegionOrders, now_s: float) -> RegionOrders:
        """Return what should be written down: declarations that peers told, and the end of a drain."""
        for region in self._names.shares:
            known = self.regions.known(region)
            if known is not None and known.declared.revision:
                orders = orders.with_declared(region, known.declared)
        own = orders.declared.get(self.own, Declared())
        is_empty = self._is_idle(now_s) and self.regions.own_percent(now_s) <= 0
        if own.state is DeclaredState.DRAINING and own.weight_percent <= 0 and is_empty:
            with suppress(OrderRefused):  # another weight has been declared since
                orders = orders.with_declared(self.own, drained(own, self._wall()))
        return orders.without_ended(self._wall())

    def take_busy(self, busy: Mapping[str, int | None] | None, now_s: float) -> None:
        """Take the own frontends and routers that serve requests, at each step (`Registry.busy`)."""
        self.busy = busy
        if busy is not None or self._heard_s is None:
            self._heard_s = now_s

    def _is_idle(self, now_s: float) -> bool:
        """True if no process of the own region serves a request, or none was known for UNKNOWN_S: all are stopped."""
        if self.busy is not None:
            return not self.busy
        return self._heard_s is not None and now_s - self._heard_s >= UNKNOWN_S

    def _is_avoid_over(self, entry: AvoidEntry | None) -> bool:
        return entry is not None and not entry.is_ok and entry.until_s <= self._wall()

    def _warn_overdue(self) -> None:
        """Note, once in a term, that the own drain lasts longer than its operator expected."""
        known = self.regions.known(self.own)
        if known is None or known.declared.until_s == self._overdue_s or not self.is_overdue(self.own):
            return
        self._overdue_s = known.declared.until_s
        self._actions.append(AppendEvent("region.overdue", self.own, known.declared.reason))

    def take_actions(self) -> list[AppendEvent | Steer]:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def _measure(self, registry: Registry, receivers: Receivers, content: Content, now_s: float) -> None:
        signals = self._measuring.measure(
            registry.ordered(),
            receivers,
            {pool.pool for pool in content.pools if pool.weight_percent},
            content.cordons,
            self._elsewhere(now_s),
            self.regions.wanted(),
            is_spilling=bool(self.regions.spill()),
        )
        self._signals, self._news = signals, None
        self._due.sequence += 1
        self.regions.on_signals(self.own, signals, now_s)
        for region, load in signals.guests.items():
            # A new leader does not know the grant of a region that died before: its guests that are here keep theirs.
            self.regions.on_given(region, load * granting.BURSTS)

    def _probe(self, receivers: Receivers, now_s: float) -> None:
        """Take what the own frontends reach: their streams to routers of other regions are the probes of the data path.

        A region is reached if one frontend reaches it. Without a frontend that reports, nothing is known.
        """
        reached: dict[str, bool] = {}
        for each in receivers:
            if each.is_connected and each.role == "frontend" and each.report is not None:
                for one in each.report.reached:
                    reached[one.region] = reached.get(one.region, False) or one.up
        for region, is_up in reached.items():
            self.regions.on_probe(region, is_up, now_s)

    def _elsewhere(self, now_s: float) -> Quantity:
        """Return the load of the own callers in other regions, as those regions report it."""
        found = NOTHING
        for peer in self._peers.values():
            if peer.news is not None and peer.news.signals is not None and not self._is_stale(peer, now_s):
                found += peer.news.signals.guests.get(self.own, NOTHING)
        return found

    def _steer(self, receivers: Receivers) -> None:
        routers = [each for each in receivers if each.is_connected and each.role == "router"]
        parts = {
            region: granting.split(
                grant, {each.process_id: _expected_tokens(each, region) for each in routers}
            )
            for region, grant in self.regions.grants().items()
        }
        for router in routers:
            grants = [_grant(region, split[router.process_id]) for region, split in parts.items()]
            self._actions.append(Steer(router.process_id, router.boot_id, pb.RegionTraffic(grants=grants)))
        spill = [pb.SpillShare(region=name, share=share) for name, share in self.regions.spill().items()]
        for each in receivers:
            if each.is_connected and each.role == "frontend":
                self._actions.append(Steer(each.process_id, each.boot_id, pb.RegionTraffic(spill=spill)))

    # Reads.

    def entries(self, now_s: float) -> tuple[RegionEntry, ...]:
        """Return the regions for the snapshot, sorted by name."""
        states, shares = self.regions.states(now_s), self.regions.shares(now_s)
        shares = {**shares, self.own: self.regions.limit_share(now_s)}
        return tuple(self._entry(states[name], shares[name]) for name in sorted(states))

    def _entry(self, state: StateView, share: float) -> RegionEntry:
        known = self._peers[state.name].entry if state.name != self.own else RegionEntry(self.own)
        return RegionEntry(
            state.name,
            PublishedState[state.declared.state.name],
            ObservedState[state.observed.name] if state.name != self.own else ObservedState.UNKNOWN,
            round(state.weight_percent),
            round(share * PERMILLE),
            known.routers,
            known.frontends,
            self._stable[1] if state.name == self.own else known.stable_version,
            self._stable[0] if state.name == self.own else known.stable_pool,
            tenants_differ=known.tenants_differ,
        )

    def news(self, term: int, now_s: float) -> News:
        """Return the news of the own region, equal until the next measurement."""
        if self._news is None or self._news.term != term:
            self._news = self._fresh_news(term, now_s)
        return self._news

    def _fresh_news(self, term: int, now_s: float) -> News:
        known = {name: self.regions.known(name) for name in (self.own, *self.regions.targets)}
        return News(
            region=self.own,
            term=term,
            sequence=self._due.sequence,
            signals=self._signals,
            routers=self._processes.get("router", ()),
            frontends=self._processes.get("frontend", ()),
            secrets=self.secrets.get(self.own, ()),
            declared=tuple(
                DeclaredNews(name, each.declared, max(0.0, now_s - each.since_s))
                for name, each in known.items()
                if each is not None and each.declared.revision
            ),
            grants=self.regions.grants(),
            stable_pool=self._stable[0],
            stable_version=self._stable[1],
            tenants_sha256=self._names.tenants_sha256,
            rollout=self.rollout,
            overrides=tuple(self.overrides.slice()),
            seed_wishes=tuple(
                dict.fromkeys(
                    each.target for each in self.regions.seeding_wanted(now_s) if each.source == self.own
                )
            ),
            seeded_from=tuple(name for name, at_s in self._seeded_s.items() if now_s - at_s < SEEDED_TOLD_S),
        )

    def seeding_sources(self, now_s: float) -> dict[str, str]:
        """Return the regions whose hot prompts should be replayed here now, each with its reason."""
        wanted = {
            each.source: each.reason for each in self.regions.seeding_wanted(now_s) if each.target == self.own
        }
        for name, peer in self._peers.items():
            is_wish = peer.news is not None and self.own in peer.news.seed_wishes
            if is_wish and not self._is_stale(peer, now_s):
                wanted.setdefault(name, f"{name} sends callers here")
        return wanted

    def rollouts(self, now_s: float) -> dict[str, RolloutNews]:
        """Return the running or last rollout of each other region, with its age now. Stale news count as well."""
        return {
            name: replace(found, age_s=found.age_s + max(0.0, now_s - peer.heard_s))
            for name, peer in self._peers.items()
            if peer.news is not None and (found := peer.news.rollout) is not None
        }

    def unheard(self, now_s: float) -> tuple[str, ...]:
        """Return the other regions that are not heard now, by name."""
        return tuple(name for name, peer in self._peers.items() if self._is_stale(peer, now_s))

    def is_overdue(self, region: str) -> bool:
        """True if the drain of a region lasts longer than its operator expected."""
        known = self.regions.known(region)
        return known is not None and known.declared.is_overdue(self._wall())

    def heard_age_s(self, region: str, now_s: float) -> float | None:
        """Return the time since the last news of a region. None: none arrived in this term."""
        peer = self._peers.get(region)
        return None if peer is None or peer.news is None else max(0.0, now_s - peer.heard_s)

    def signals(self, region: str) -> Signals | None:
        """Return the last signals of a region, however old."""
        if region == self.own:
            return self._signals
        peer = self._peers.get(region)
        return peer.news.signals if peer is not None and peer.news is not None else None

    def grants_of(self, region: str) -> Mapping[str, Quantity]:
        """Return the grants that a region gives, as last heard."""
        if region == self.own:
            return self.regions.grants()
        peer = self._peers.get(region)
        return peer.news.grants if peer is not None and peer.news is not None else {}

    def is_stale(self, region: str, now_s: float) -> bool:
        """True if no news of a region arrived for STALE_S."""
        peer = self._peers.get(region)
        return peer is not None and self._is_stale(peer, now_s)

    def entry(self, region: str) -> RegionEntry:
        """Return the processes and the stable version of a region."""
        return self._peers[region].entry if region != self.own else RegionEntry(self.own)

    @property
    def stable(self) -> tuple[str, str]:
        """Pool and model version that serve the own users."""
        return self._stable

    def _is_stale(self, peer: Peer, now_s: float) -> bool:
        return now_s - peer.heard_s > STALE_S


def _processes(members: Iterable[Member], content: Content) -> dict[str, tuple[RegionProcess, ...]]:
    """Return the routers and the frontends of the own region, at most PROCESSES_MAX of each, ordered by name."""
    found: dict[str, list[RegionProcess]] = {"router": [], "frontend": []}
    for member in members:
        if member.role in found and len(found[member.role]) < PROCESSES_MAX:
            found[member.role].append(
                RegionProcess(
                    member.process_id,
                    member.address,
                    member.boot_id,
                    member.pool if member.role == "router" else "",
                    member.model_version,
                    member.block_tokens,
                    is_draining=not is_in_use(member, content.cordons),
                    capabilities=member.capabilities,
                )
            )
    return {role: tuple(processes) for role, processes in found.items()}


def _expected_tokens(router: Receiver, region: str) -> float:
    """Return the load by which a router gets a part of a grant: of own callers and of guests from `region`, in tokens/s.

    Guests choose routers as own callers do. So a grant is where they come, also before the first of them.
    """
    if router.report is None:
        return 0.0
    load = router.report.region_load
    guests = next((each.load.tokens_per_s for each in load.guests if each.region == region), 0.0)
    return load.own.tokens_per_s + guests


def _grant(region: str, quantity: Quantity) -> region_pb.Grant:
    return region_pb.Grant(
        region=region,
        quantity=region_pb.Quantity(tokens_per_s=quantity.tokens_per_s, blocks=quantity.blocks),
    )


def _differ(one: bytes, other: bytes) -> bool:
    """True if both digests are known and differ."""
    return bool(one) and bool(other) and one != other
