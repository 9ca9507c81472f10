"""Random schedules of faults for simulated regions, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from controlplane.regions import orders
from controlplane.regions.observed import State
from controlplane.regions.orders import AvoidOrder, Drain, OrderRefused
from controlplane.regions.settings import RegionSettings
from tests.simulation.regions.nodes import Region
from tests.simulation.regions.world import World

SETTLE_S = 35.0
"""Time before the first fault."""
FAULTS_S = 130.0
"""Time of the faults. After it everything heals."""
REAL_EVERY = 8
"""One of so many seeds has the real times of recovery. The others have short ones: targets flap within the faults."""
SHORT = replace(
    RegionSettings(),
    out_min_s=30.0,
    out_max_s=240.0,
    recovered_after_s=15.0,
    seeding_max_s=15.0,
    stage_s=6.0,
    cold_below_s=20.0,
)
UNSETTLED_S = 25.0
"""Time after the healing in which old signals may still make a target suspect: the window and the time below 0.7."""
HEALED_S = 70.0
"""Time after the last transition in which spill falls to 0, by 2 points a second, and signals settle."""


class Schedule:
    """Runs one seed: faults, the healing, the bound in which the weights are right again."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.settings = RegionSettings() if seed % REAL_EVERY == 0 else SHORT
        self.world = World(seed, self.settings)
        self.rng = random.Random(f"faults {seed}")
        self.is_quiet = False
        """True after the last fault: operators order nothing more."""
        self.healed_after_s = 0.0
        """Time from the last fault until all weights were right."""

    def run(self) -> None:
        """Run the schedule; raise AssertionError if a check fails."""
        world = self.world
        world.clock.run_until(world.now_s + SETTLE_S)
        self._plan()
        world.clock.run_until(world.now_s + FAULTS_S)
        self._heal()
        began_s = world.now_s
        world.clock.run_until(began_s + UNSETTLED_S)
        bound_s = self._bound_s()
        while world.now_s - began_s < bound_s and not world.weights_are_right():
            world.clock.run_until(world.now_s + 5.0)
        assert world.weights_are_right(), f"not healed after {bound_s:.0f} s:\n{self.explain()}"
        self.healed_after_s = world.now_s - began_s
        world.clock.run_until(world.now_s + 20.0)
        assert world.weights_are_right(), f"not stable after it healed:\n{self.explain()}"
        world.checkers.check_end()

    def explain(self) -> str:
        """Return the states as each control process has them, and the last events."""
        lines = [
            f"{region.name} of {view.name}: {view.observed.value} {view.weight_percent:g} %, {view.reason}; "
            f"health {view.health}, spill {region.control.regions.spill()}"
            for region in self.world.regions.values()
            for view in region.control.regions.states(self.world.now_s).values()
        ]
        return "\n".join([*lines, *(map(str, self.world.events[-20:]))])

    def _bound_s(self) -> float:
        """Return the longest time of a recovery from now on."""
        settings = self.settings
        dwell_s = max(
            (
                max(settings.out_min_s, each.observed.dwell_s)
                for region in self.world.regions.values()
                for each in region.control.regions.targets.values()
                if each.observed.state is not State.HEALTHY
            ),
            default=settings.out_min_s,
        )
        stages_s = settings.stage_s * len(settings.stages_percent)
        # A target that is still RECOVERING or SUSPECT may go out once more, for what was seen before the healing.
        return 2 * dwell_s + settings.recovered_after_s + settings.seeding_max_s + stages_s + HEALED_S

    # Faults.

    def _plan(self) -> None:
        faults: tuple[Callable[[], None], ...] = (
            self._kill_region,
            self._kill_region,
            self._kill_several,
            self._cut_one_way,
            self._cut_both_ways,
            self._isolate,
            self._crash_control,
            self._crash_all_controls,
            self._freeze_control,
            self._freeze_in_cut,
            self._forget_and_drain,
            self._step_clock,
            self._lose_replicas,
            self._lose_replicas,
            self._ill_everywhere,
            self._slow,
            self._fail_attempts,
            self._peak,
            self._peak,
            self._flap,
            self._drain,
            self._drain,
            self._restore,
            self._avoid,
        )
        for _ in range(self.rng.randrange(1, 10)):
            self.world.clock.after(self.rng.uniform(0, FAULTS_S), self.rng.choice(faults))

    def _region(self) -> Region:
        return self.world.regions[self.rng.choice(self.world.names)]

    def _later(self, low_s: float, high_s: float, run: Callable[[], None]) -> None:
        self.world.clock.after(self.rng.uniform(low_s, high_s), run)

    def _kill_region(self) -> None:
        self._kill(self._region())

    def _kill_several(self) -> None:
        for name in self.rng.sample(self.world.names, self.rng.randrange(1, len(self.world.names) + 1)):
            self._kill(self.world.regions[name])

    def _kill(self, region: Region) -> None:
        region.is_alive = False
        region.backlog, region.changed_s = 0.0, self.world.now_s
        self.world.crash(region, loses_redis=self.rng.random() < 0.5)
        self._later(1, 90, lambda: self._revive(region))

    def _revive(self, region: Region) -> None:
        if not region.is_alive:
            region.is_alive = True
            region.engines_since_s = region.changed_s = self.world.now_s
        if not region.control.is_up:
            self.world.start(region)

    def _cut_one_way(self) -> None:
        first, second = self.rng.sample(self.world.names, 2)
        self._cut({(first, second)})

    def _cut_both_ways(self) -> None:
        first, second = self.rng.sample(self.world.names, 2)
        self._cut({(first, second), (second, first)})

    def _isolate(self) -> None:
        name = self._region().name
        self._cut({link for other in self.world.names for link in ((name, other), (other, name))})

    def _cut(self, links: set[tuple[str, str]]) -> None:
        self.world.cut |= links
        self._later(2, 90, lambda: self.world.cut.difference_update(links))

    def _crash_control(self) -> None:
        region = self._region()
        self.world.crash(region, loses_redis=self.rng.random() < 0.3)
        self._later(0.5, 60, lambda: self._revive_control(region))

    def _crash_all_controls(self) -> None:
        for region in self.world.regions.values():
            self.world.crash(region)
            self._later(5, 60, lambda region=region: self._revive_control(region))  # type: ignore[misc]  # bound now

    def _revive_control(self, region: Region) -> None:
        if region.is_alive and not region.control.is_up:
            self.world.start(region)

    def _freeze_control(self) -> None:
        self._region().control.paused_until_s = self.world.now_s + self.rng.uniform(1, 60)

    def _freeze_in_cut(self) -> None:
        """A control process freezes after the first failed probes, and wakes up after many more."""
        first, second = self.rng.sample(self.world.names, 2)
        links = {(first, second), (second, first)}
        control = self.world.regions[first].control
        self.world.cut |= links

        def freeze() -> None:
            control.paused_until_s = self.world.now_s + self.rng.uniform(10, 40)
            self.world.clock.at(control.paused_until_s + 2.0, lambda: self.world.cut.difference_update(links))

        self._later(1.5, 4.5, freeze)

    def _forget_and_drain(self) -> None:
        """A region loses its memory, and an operator drains it before a peer has told it anything."""
        region = self._region()
        if region.is_alive:
            self.world.crash(region, loses_redis=True)
            self.world.start(region)
            self._drain_in(region)

    def _step_clock(self) -> None:
        region = self._region()
        self.world.stepped.add(region.name)
        region.control.wall_offset_s += self.rng.choice((-3600, -60, 60, 3600))

    def _lose_replicas(self) -> None:
        self._ail(self._region())

    def _ill_everywhere(self) -> None:
        for region in self.world.regions.values():
            if self.rng.random() < 0.8:
                self._ail(region)

    def _ail(self, region: Region) -> None:
        region.serving, region.changed_s = self.rng.randrange(0, region.replicas), self.world.now_s

        def recover() -> None:
            region.serving, region.changed_s = region.replicas, self.world.now_s

        self._later(5, 90, recover)

    def _slow(self) -> None:
        region = self._region()
        region.slowness, region.changed_s = 1.5, self.world.now_s

        def recover() -> None:
            region.slowness, region.changed_s = 1.0, self.world.now_s

        self._later(10, 90, recover)

    def _fail_attempts(self) -> None:
        region = self._region()
        region.failure_share = self.rng.choice((0.2, 0.4, 0.8))
        self._later(5, 90, lambda: setattr(region, "failure_share", 0.0))

    def _peak(self) -> None:
        region = self._region()
        region.load_factor, region.changed_s = self.rng.choice((2.0, 3.0, 5.0)), self.world.now_s

        def end() -> None:
            region.load_factor, region.changed_s = 1.0, self.world.now_s

        self._later(10, 90, end)

    def _flap(self) -> None:
        first, second = self.rng.sample(self.world.names, 2)
        self.world.flapping.add((first, second))
        self._later(20, 90, lambda: self.world.flapping.discard((first, second)))

    # Operators.

    def _drain(self) -> None:
        self._drain_in(self._region())

    def _drain_in(self, region: Region) -> None:
        if self._answers(region):
            known = region.control.regions.known(region.name)
            assert known is not None
            wall_s = self.world.wall_s(region.control)
            order = Drain(region.name, "rack move", weight_percent=self.rng.choice((0.0, 0.0, 40.0)))
            self.world.declare(
                region, orders.drain(order, known.declared, self.world.names, "operator", wall_s)
            )
            self._later(15, 40, lambda: self._drained(region))
            if self.rng.random() < 0.7:
                self._later(20, 90, lambda: self._restore_in(region))

    def _drained(self, region: Region) -> None:
        known = region.control.regions.known(region.name)
        if self._answers(region) and known is not None:
            try:
                declared = orders.drained(known.declared, self.world.wall_s(region.control))
            except OrderRefused:
                return
            self.world.declare(region, declared)

    def _restore(self) -> None:
        self._restore_in(self._region())

    def _restore_in(self, region: Region) -> None:
        known = region.control.regions.known(region.name)
        if self._answers(region) and known is not None and not known.declared.is_serving:
            wall_s = self.world.wall_s(region.control)
            declared = orders.restore(
                region.name, "done", known.declared, self.world.names, "operator", wall_s
            )
            self.world.declare(region, declared)

    def _avoid(self) -> None:
        region = self._region()
        if self._answers(region):
            order = AvoidOrder(
                self.rng.choice(region.others), self.rng.uniform(10, 60), "too ill", self.rng.random() < 0.3
            )
            avoid = orders.avoid(order, region.name, self.world.names, "operator", self.world.now_s)
            region.control.regions.on_avoid(order.region, avoid, self.world.now_s)

    def _answers(self, region: Region) -> bool:
        if self.is_quiet:
            return False
        return region.control.is_up and self.world.now_s >= region.control.paused_until_s

    # The end of all faults.

    def _heal(self) -> None:
        world = self.world
        self.is_quiet = True
        world.cut.clear()
        world.flapping.clear()
        for region in world.regions.values():
            region.control.paused_until_s = min(region.control.paused_until_s, world.now_s)
            region.serving, region.slowness, region.failure_share = region.replicas, 1.0, 0.0
            region.load_factor, region.changed_s = 1.0, world.now_s
            self._revive(region)
