"""The regions as the control plane of one of them knows them, and its decisions for its own callers. Pure.

The decisions bind the own region alone: its spill, the grants that its routers enforce, its shares of limits, its seeding.
About itself a region knows its load and its declared state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from controlplane.regions import grants as granting
from controlplane.regions import observed as machine
from controlplane.regions.declared import SERVING, Declared, Known, merge, ramp
from controlplane.regions.forecast import Forecast, forecast
from controlplane.regions.observed import Avoid, Observed, State
from controlplane.regions.panic import Capacity, is_panic
from controlplane.regions.seeding import Seeding, seedings
from controlplane.regions.settings import RegionSettings
from controlplane.regions.shares import Limits, borrowed, moved
from controlplane.regions.signals import Signals, SignalWindow
from controlplane.regions.target import Target
from controlplane.regions.views import View, of_target, state_word
from kvmesh.regions import spill as spilling
from kvmesh.regions.quantity import NOTHING, Quantity
from kvmesh.regions.spill import Demand, Spill

EVENTS_MAX: Final = 256
"""Most events between two calls of `take_events`; later ones are dropped."""


class Event(msgspec.Struct, frozen=True):
    """A change that the audit keeps."""

    what: str
    region: str
    reason: str


class Regions:
    """See the module. Events come by `on_...`, time by `step`, about once a second."""

    def __init__(
        self,
        own: str,
        names: Collection[str],
        settings: RegionSettings,
        *,
        shares: Mapping[str, float] | None = None,
        limits: Limits = Limits.BORROW,
    ) -> None:
        """`names`: all regions, the own one among them. `shares`: of limits, which sum to 1; None: equal ones."""
        assert own in names, f"{own} is none of {sorted(names)}"
        self.own = own
        self.settings = settings
        self.limits = limits
        self.targets = {name: Target(name, settings) for name in sorted(names) if name != own}
        self.is_panic = False
        """True if health takes no region out."""
        self._base_shares = dict(shares or dict.fromkeys(sorted(names), 1.0 / len(names)))
        self._known = Known(SERVING, float("-inf"))
        self._window = SignalWindow(settings)
        self._spill = Spill()
        self._wanted = NOTHING
        self._events: list[Event] = []

    # Events.

    def on_signals(self, region: str, signals: Signals, now_s: float) -> None:
        """Take signals of a region, the own one included. The caller has checked `Signals.fault`."""
        if region == self.own:
            self._window.add(signals, now_s)
        elif region in self.targets:
            self.targets[region].window.add(signals, now_s)

    def on_grant(self, region: str, grant: Quantity, now_s: float) -> None:
        """Take the grant of a target to the own region: each renews it with its signals."""
        if region in self.targets:
            self.targets[region].on_grant(grant, now_s)

    def on_given(self, region: str, grant: Quantity) -> None:
        """Take a grant that the own routers still enforce: after a restart it is the floor of an unheard source."""
        target = self.targets.get(region)
        if target is not None and target.given.is_zero:
            target.given = target.floor = grant

    def on_declared(self, region: str, declared: Declared, age_s: float, now_s: float) -> None:
        """Take a declared state, told `age_s` after it began: by its region, by a peer that remembers it, or by a store."""
        known = self.known(region)
        if known is None or merge(known.declared, declared) is known.declared:
            return
        since_s = now_s - max(0.0, age_s)
        is_same_drain = not known.declared.is_serving and declared.at_s == known.declared.at_s
        if is_same_drain and not declared.is_serving:
            since_s = min(since_s, known.since_s)  # whatever a clock says since
        told = Known(declared, since_s)
        if region == self.own:
            self._known = told
        else:
            self.targets[region].known = told
        by = f" by {declared.author}" if declared.author else ""
        self._note(f"region.{declared.state.value.lower()}", region, f"{declared.reason or 'declared'}{by}")

    def on_age(self, region: str, declared: Declared, age_s: float, now_s: float) -> None:
        """Take the age of its state from a region itself, after `on_declared`. A listener may know it by a wrong clock.

        A drain only becomes older, so no load comes back.
        """
        target = self.targets.get(region)
        if target is not None and declared.revision == target.declared.revision:
            target.known = Known(target.declared, min(target.known.since_s, now_s - max(0.0, age_s)))

    def on_observed(
        self, region: str, state: State, weight_percent: float, reason: str, now_s: float
    ) -> None:
        """Take the state that the last leader observed: from a snapshot, before the first signals of that region.

        `weight_percent`: the weight for which it was published.
        """
        target = self.targets.get(region)
        if target is not None and not target.observed.is_heard and not target.observed.is_by_hand:
            target.observed = machine.restored(state, weight_percent, reason, now_s, self.settings)

    def on_avoid(self, region: str, avoid: Avoid | None, now_s: float) -> None:
        """Take an operator's override of what is observed; None takes it back."""
        target = self.targets.get(region)
        if target is None:
            return
        before = target.observed
        target.observed = (
            machine.released(before, now_s) if avoid is None else machine.ordered(before, avoid, now_s)
        )
        self._note_transition(target, before)

    def on_probe(self, region: str, is_ok: bool, now_s: float) -> None:
        """Take the result of a probe of a target's data path."""
        if region in self.targets:
            self.targets[region].on_probe(is_ok, now_s)

    def on_seeded(self, region: str) -> None:
        """Note that a target has replayed the own hot prompts. Only a target that waits for that to recover counts it."""
        target = self.targets.get(region)
        if target is not None and target.observed.wants_seeding(self.settings):
            target.is_seeded = True

    # Decisions.

    def step(self, now_s: float) -> None:
        """Bring states, spill and grants to `now_s`."""
        self._observe(now_s)
        self._spread(now_s)
        self._grant(now_s)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # Reads.

    def known(self, region: str) -> Known | None:
        """Return the declared state of a region and when it began. None: the region is unknown."""
        if region == self.own:
            return self._known
        target = self.targets.get(region)
        return target.known if target is not None else None

    def own_percent(self, now_s: float) -> float:
        """Return the weight that the own region declares for itself."""
        return ramp(self._known.declared, now_s - self._known.since_s, self.settings)

    def states(self, now_s: float) -> dict[str, View]:
        """Return every region by its name."""
        own = View(
            name=self.own,
            declared=self._known.declared,
            observed=State.HEALTHY,
            is_by_hand=False,
            by_hand_until_s=0.0,
            weight_percent=self.own_percent(now_s),
            reason=self._known.declared.reason,
            since_s=self._known.since_s,
            health=self._window.health(now_s),
            is_heard=self._window.latest(now_s) is not None,
            is_hard_down=False,
        )
        return {
            self.own: own,
            **{name: of_target(each, now_s, self.settings) for name, each in self.targets.items()},
        }

    def grants(self) -> dict[str, Quantity]:
        """Return the grants of the own region by source."""
        return {name: each.given for name, each in self.targets.items()}

    def spill(self) -> dict[str, float]:
        """Return the shares of the own callers by target."""
        return dict(self._spill.shares)

    def wanted(self) -> Quantity:
        """Return the load that the own region asks grants for: the `wanted` of its next signals."""
        return self._wanted

    def limit_share(self, now_s: float) -> float:
        """Return the part of each tenant's limit that the own region enforces: its moved share and what it borrows.

        A region that is DRAINED itself borrows from hard-down regions alone.
        """
        shares = self.shares(now_s)
        is_drained = self._known.declared.state.is_drained
        lenders = [
            name
            for name, each in self.targets.items()
            if each.is_hard_down or (each.declared.state.is_drained and not is_drained)
        ]
        return min(1.0, shares[self.own] + borrowed(shares, self.own, lenders, self.limits))

    def shares(self, now_s: float) -> dict[str, float]:
        """Return the share of each region under the declared states."""
        percent = {name: each.declared_percent(now_s) for name, each in self.targets.items()}
        return moved(self._base_shares, {**percent, self.own: self.own_percent(now_s)})

    def forecast_drain(self, region: str, now_s: float) -> Forecast | None:
        """Return the forecast of a drain of `region`; None: its load is unknown."""
        signals = self._signals(region, now_s)
        if signals is None:
            return None
        rooms: dict[str, Quantity] = {}
        left_out: dict[str, str] = {}
        for name, view in self.states(now_s).items():
            if name == region:
                continue
            each = self._signals(name, now_s)
            if each is None:
                left_out[name] = "not heard"
            elif view.weight_percent < 100.0:
                left_out[name] = f"{state_word(view)} at {view.weight_percent:.0f} %"
            else:
                rooms[name] = granting.headroom(each.capacity, each.full_load, self.settings.grant_share)
        return forecast(region, signals.load, signals.cold_factor, rooms, left_out)

    def seeding_wanted(self, now_s: float) -> tuple[Seeding, ...]:
        """Return the seedings that would help now. The shell decides how many run, and tells their end of OUT targets."""
        found = seedings(
            self.own,
            self.targets.values(),
            self._spill.shares,
            is_spill_wanted=not self._wanted.is_zero,
            now_s=now_s,
            settings=self.settings,
        )
        return tuple(dict.fromkeys(found))

    # Parts.

    def _observe(self, now_s: float) -> None:
        capacities = [each.capacity(now_s) for each in self.targets.values()]
        self.is_panic = is_panic([self._own_capacity(now_s), *capacities], self.settings)
        signals = {name: self._signals(name, now_s) for name in (self.own, *self.targets)}
        ages_s = {
            name: each.engine_age_s
            for name, each in signals.items()
            if each and not each.capacity.is_zero and math.isfinite(each.engine_age_s)
        }
        for target in self.targets.values():
            oldest_s = max((age_s for name, age_s in ages_s.items() if name != target.name), default=0.0)
            before = target.observed
            facts = target.facts(now_s, is_panic=self.is_panic, oldest_s=oldest_s)
            target.observed = machine.step(before, facts, now_s, self.settings)
            if target.observed.state is not before.state and target.observed.state is State.OUT:
                target.is_seeded = False
            self._note_transition(target, before)

    def _own_capacity(self, now_s: float) -> Capacity:
        own = self._window.last
        return Capacity(
            own.leased_capacity.tokens_per_s if own is not None else 0.0,
            self._window.health(now_s),
            is_declared=not self._known.declared.is_serving,
        )

    def _spread(self, now_s: float) -> None:
        """Step the shares of spill. Without own signals the last demand holds: weights stay."""
        own = self._window.last
        if own is None:
            return
        demand = Demand(own.load, own.cold_load, own.capacity, self.own_percent(now_s))
        targets = [each.spill_target(now_s) for each in self.targets.values()]
        self._wanted = spilling.wanted_load(demand, self.settings.spill)
        self._spill = spilling.step(self._spill, demand, targets, now_s, self.settings.spill)

    def _grant(self, now_s: float) -> None:
        """Allot the headroom. Without own signals the grants stay: the headroom is unknown."""
        own = self._window.latest(now_s)
        if own is None:
            return
        part, settings = self.own_percent(now_s) / 100.0, self.settings
        room = granting.headroom(own.capacity, own.load, settings.grant_share * part)
        whole = granting.headroom(own.capacity, own.load, settings.grant_lost_share * part)
        lost = {name: each for name, each in self.targets.items() if each.is_lost(now_s)}
        heard = {
            name: signals
            for name, each in self.targets.items()
            if (name not in lost or each.is_drained(now_s)) and (signals := each.signals(now_s))
        }
        sources = {name: granting.Source(each.wanted, each.cold_load) for name, each in heard.items()}
        unheard = {name: each for name, each in lost.items() if name not in heard}
        for name, each in unheard.items():
            if each.window.last is not None:
                sources[name] = granting.Source(load=each.window.last.cold_load)
        for name, guests in own.guests.items():
            # A region that returns knows no load yet, and a new leader none of a dead region. Their callers are here.
            if name in self.targets:
                source = sources.get(name, granting.Source())
                sources[name] = granting.Source(source.wanted, source.load.most(guests))
        given = granting.allot(
            room,
            sources,
            {name: each.floor for name, each in unheard.items()},
            self.grants(),
            is_frozen=self._spill.total > 0
            or own.full_load.share_of(own.capacity) > settings.grant_new_below,
        )
        callers = {name: sources[name] for name in lost if name in sources}
        for name, grant in granting.with_rest(given, whole - room, callers).items():
            self.targets[name].given = grant
            if name in heard:
                self.targets[name].floor = grant

    def _signals(self, region: str, now_s: float) -> Signals | None:
        if region == self.own:
            return self._window.latest(now_s)
        target = self.targets.get(region)
        return target.signals(now_s) if target is not None else None

    def _note_transition(self, target: Target, before: Observed) -> None:
        after = target.observed
        if after.state is not before.state or after.is_by_hand != before.is_by_hand:
            self._note(f"region.{after.state.value.lower()}", target.name, after.reason)

    def _note(self, what: str, region: str, reason: str) -> None:
        if len(self._events) < EVENTS_MAX:
            self._events.append(Event(what, region, reason))
