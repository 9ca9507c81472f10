"""Two to four regions on a virtual clock: real decisions of each, links that are cut by direction, callers, guests.

Each control process steps once a second and tells the others its signals, grants and declared states every 2 s. Routers and
frontends keep the last orders while it is down, frozen or restarted. Every step and admission is checked on the spot.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from controlplane.regions import grants as granting
from controlplane.regions.declared import Declared
from controlplane.regions.observed import State
from controlplane.regions.regions import Regions
from controlplane.regions.settings import RegionSettings
from controlplane.regions.signals import Replicas, Signals
from kvmesh.regions.quantity import Quantity
from kvmesh.regions.targets import Targets
from tests.simulation.regions.checkers import Checkers
from tests.simulation.regions.clock import Clock
from tests.simulation.regions.nodes import WALL_S, Control, Redis, Region
from tests.simulation.regions.traffic import Traffic

NAMES = ("ap", "eu", "sa", "us")
STEP_S = 1.0
SIGNALS_EVERY = 2
"""Steps between two signals."""


class World:
    """See the module. INVARIANT: nothing here reads a region's truth on behalf of another one, but probes and links."""

    def __init__(self, seed: int, settings: RegionSettings) -> None:
        self.seed = seed
        self.settings = settings
        self.rng = random.Random(seed)
        self.clock = Clock(1000.0)
        names = NAMES[: self.rng.choice((2, 2, 3, 3, 3, 4))]
        self.names = list(names)
        self.cut: set[tuple[str, str]] = set()
        """Directed links that lose everything: (from, to)."""
        self.flapping: set[tuple[str, str]] = set()
        """Probes (from, to) that fail once in 3 s."""
        self.stepped: set[str] = set()
        """Regions with a wall clock that was set."""
        self.events: list[tuple[float, str, str, str, str]] = []
        """(time, observer, what, region, reason)."""
        self.regions = {
            name: Region(name, [other for other in names if other != name], self.rng, self.now_s)
            for name in names
        }
        self.checkers = Checkers(self)
        self.traffic = Traffic(self)
        for region in self.regions.values():
            self.start(region)
        self._tick()

    @property
    def now_s(self) -> float:
        """Virtual time, which no clock step changes."""
        return self.clock.now_s

    # Control processes.

    def start(self, region: Region) -> None:
        """Start or restart the control process of a region without memory, except for what Redis and routers hold."""
        control = region.control
        control.boot += 1
        control.is_up, control.paused_until_s, control.seedings = True, 0.0, {}
        control.stepped_s = self.now_s
        control.regions = Regions(region.name, self.names, self.settings)
        stored = region.redis.declared
        if stored.revision:
            age_s = max(0.0, self.wall_s(control) - stored.at_s)
            control.regions.on_declared(region.name, stored, age_s, self.now_s)
        for other, (state, weight_percent, reason) in region.redis.observed.items():
            control.regions.on_observed(other, state, weight_percent, reason, self.now_s)
        for source in region.others:
            control.regions.on_given(source, region.enforced(source))
        self.checkers.on_start(region)
        boot = control.boot
        self.clock.after(self.rng.random(), lambda: self.on(control, boot, lambda: self._beat(region, boot)))

    def crash(self, region: Region, *, loses_redis: bool = False) -> None:
        """End the control process without a warning."""
        region.control.is_up = False
        region.control.boot += 1
        if loses_redis:
            region.redis = Redis()
        self.checkers.on_lost_memory()

    def on(self, control: Control, boot: int, run: Callable[[], None]) -> None:
        """Run `run` at a control process: later if it is frozen, never if it restarted."""
        if not control.is_up or control.boot != boot:
            return
        if self.now_s < control.paused_until_s:
            self.clock.at(control.paused_until_s, lambda: self.on(control, boot, run))
            return
        run()

    def wall_s(self, control: Control) -> float:
        """Return the wall clock of a control process."""
        return WALL_S + self.now_s + control.wall_offset_s

    def declare(self, region: Region, declared: Declared) -> None:
        """Take a declared state that an operator ordered in its region."""
        region.redis.declared = declared
        region.control.regions.on_declared(region.name, declared, 0.0, self.now_s)
        self.checkers.on_declared(region, declared)

    def _beat(self, region: Region, boot: int) -> None:
        control, now_s = region.control, self.now_s
        regions = control.regions
        if control.beat % SIGNALS_EVERY == 0:
            self._tell(region)
        control.beat += 1
        for other in region.others:
            is_ok = self._probe(region.name, other)
            regions.on_probe(other, is_ok, now_s)
            self.checkers.on_probe(region.name, boot, other, is_ok)
        before = {name: each.observed for name, each in regions.targets.items()}
        grants, shares = regions.grants(), regions.spill()
        regions.step(now_s)
        elapsed_s, control.stepped_s = now_s - control.stepped_s, now_s
        self.checkers.on_step(region, before, grants, shares, elapsed_s)
        for event in regions.take_events():
            self.events.append((now_s, region.name, event.what, event.region, event.reason))
        self._seed(control)
        self._apply(region)
        self.clock.after(STEP_S, lambda: self.on(control, boot, lambda: self._beat(region, boot)))

    def _probe(self, source: str, target: str) -> bool:
        if (source, target) in self.flapping and int(self.now_s) % 3 == 0:
            return False
        return self.reaches(source, target)

    def reaches(self, source: str, target: str) -> bool:
        """True if a request of `source` is answered by the data path of `target`."""
        return (
            self.regions[target].is_alive
            and (source, target) not in self.cut
            and (target, source) not in self.cut
        )

    def _tell(self, region: Region) -> None:
        control = region.control
        signals = self._signals(region)
        assert not signals.fault(), signals.fault()
        control.regions.on_signals(region.name, signals, self.now_s)
        self.checkers.on_signals(region, region.name, signals)
        grants = control.regions.grants()
        declared = [
            (name, known.declared, self.now_s - known.since_s)
            for name in self.names
            if (known := control.regions.known(name)) is not None and known.declared.revision
        ]
        for other in region.others:
            self._send(region, self.regions[other], signals, grants[other], declared)

    def _send(
        self,
        source: Region,
        target: Region,
        signals: Signals,
        grant: Quantity,
        declared: list[tuple[str, Declared, float]],
    ) -> None:
        boot = target.control.boot

        def take() -> None:
            regions = target.control.regions
            regions.on_signals(source.name, signals, self.now_s)
            regions.on_grant(source.name, grant, self.now_s)
            self.checkers.on_granted(target, source.name, grant)
            for name, each, age_s in declared:
                regions.on_declared(name, each, age_s, self.now_s)
                if name == target.name and each.revision > target.redis.declared.revision:
                    target.redis.declared = each
            self.checkers.on_signals(target, source.name, signals)

        def arrive() -> None:
            if (source.name, target.name) not in self.cut:
                self.on(target.control, boot, take)

        self.clock.after(self.rng.uniform(0.001, 0.1), arrive)

    def _signals(self, region: Region) -> Signals:
        signals = Signals(
            replicas={"decode": Replicas(region.serving, region.replicas)},
            attempts=region.attempts,
            failures=region.failures,
            load=region.load,
            cold_factor=1 / (1 - region.hit_ratio),
            guests={name: Quantity(rate) for name, rate in region.guests.items()},
            capacity=region.capacity,
            leased_capacity=region.full_capacity,
            wanted=region.control.regions.wanted(),
            is_spilling=bool(region.control.regions.spill()),
            engine_age_s=self.now_s - region.engines_since_s,
        )
        region.attempts = region.failures = 0
        return signals

    def _seed(self, control: Control) -> None:
        for seeding in control.regions.seeding_wanted(self.now_s):
            if seeding.source == control.name:
                control.seedings.setdefault(seeding.target, self.now_s + self.rng.uniform(3, 40))
        for target, ends_s in list(control.seedings.items()):
            if ends_s <= self.now_s:
                del control.seedings[target]
                control.regions.on_seeded(target)

    def _apply(self, region: Region) -> None:
        """Bring grants to the routers, shares to the frontends, and states into the snapshot."""
        regions = region.control.regions
        for source, grant in regions.grants().items():
            recent = {router.name: router.recent[source] for router in region.routers}
            parts = granting.split(grant, recent)
            for router in region.routers:
                router.buckets[source].set_grant(parts[router.name], self.now_s)
                router.recent[source] /= 2
            self.checkers.on_grant(region.name, source, grant)
        shares = regions.spill()
        if shares != region.shares:
            region.shares, region.targets = shares, Targets(region.name, region.others, shares)
        region.redis.observed = {
            name: (each.observed.state, each.weight_percent(self.now_s), each.observed.reason)
            for name, each in regions.targets.items()
            if not each.observed.is_by_hand
        }

    # Callers.

    def _tick(self) -> None:
        self.traffic.tick()
        self.clock.after(STEP_S, self._tick)

    # Reads.

    def weights_are_right(self) -> bool:
        """True if each control process gives each other region its declared weight, and spills for a drain alone."""
        for region in self.regions.values():
            control = region.control
            if not control.is_up:
                return False
            regions = control.regions
            for target in regions.targets.values():
                declared = self.regions[target.name].control.regions.own_percent(self.now_s)
                if (
                    target.observed.state is not State.HEALTHY
                    or target.weight_percent(self.now_s) != declared
                ):
                    return False
            if regions.spill() and regions.own_percent(self.now_s) == 100:
                return False
        return True
