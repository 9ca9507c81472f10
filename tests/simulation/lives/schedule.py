"""One seed: a fleet, faults of every kind for a minute, then five minutes in which one leader proves every replica."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from kvmesh.life_state import LifeState
from tests.simulation.lives.nodes import Control, Replica
from tests.simulation.lives.world import World

FAULTS_S = 60.0
HEALED_S = 300.0


class Schedule:
    """See the module."""

    def __init__(self, seed: int) -> None:
        chance = self._chance = random.Random(seed)
        has_set = chance.random() < 0.6
        self.world = World(seed, chance, has_set=has_set, packages=chance.random() < 0.5)
        self._bad_share = chance.choice((0.0, 0.0, 0.3)) if has_set else chance.choice((0.0, 0.0, 0.0, 0.3))
        self.had_bad = False
        self._rate_s = chance.choice((1.5, 4.0, 12.0, 40.0))
        """Mean time between two faults."""
        if self.world.stored and chance.random() < 0.5:
            self.world.poison.add(chance.choice(sorted(self.world.stored)))

    def run(self) -> None:
        """Run the seed. Raises AssertionError."""
        world, chance = self.world, self._chance
        world.lead(world.controls[0])
        pools = ["default", "other"] if chance.random() < 0.3 else ["default"]
        has_loop = chance.random() < 0.2
        if has_loop:  # a fresh replica of a pool in service, whose warm-up ends its boots
            pools, self._rate_s = ["default"], 40.0
        for at in range(6 if has_loop else chance.randint(2, 6)):
            role = ("decode", "prefill")[at % 2]
            replica = Replica(f"{role}-{at}", role, pools[at // 2 % len(pools)], chance.random() < 0.7)
            begin = partial(world.add, replica, is_bad=self._is_bad())
            if has_loop and at == 5:
                world.crash_loops[replica.name] = 4
                world.after(10.0, begin)
            else:
                world.after(0.0 if has_loop else chance.choice((0.0, chance.uniform(0, 20))), begin)
        world.after(self._pause_s(), self._fault)
        world.run(world.now_s + FAULTS_S)
        self._heal()
        world.run(world.now_s + HEALED_S, is_over=world.are_proved)
        if world.has_set or not self.had_bad:
            late = [f"{each.name}: {each.life}" for each in world.replicas.values()]
            assert world.are_proved(), f"not all replicas are proved after {HEALED_S:g} s: {late}"

    def _is_bad(self) -> bool:
        is_bad = self._chance.random() < self._bad_share
        self.had_bad = self.had_bad or is_bad
        return is_bad

    def _pause_s(self) -> float:
        return self._chance.expovariate(1 / self._rate_s)

    def _fault(self) -> None:
        if self.world.now_s >= FAULTS_S - 5:
            return
        self._chance.choice(self._faults())()
        self.world.after(self._pause_s(), self._fault)

    def _faults(self) -> list[Callable[[], None]]:
        world, chance = self.world, self._chance
        control = chance.choice(world.controls)
        faults: list[Callable[[], None]] = [
            partial(self._takeover, lambda: world.crash_control(control), control),
            partial(self._takeover, lambda: world.pause(control, chance.uniform(1, 6)), control),
            self._both_lead,
            self._lose_redis,
            self._delay,
        ]
        if world.replicas:
            replica = world.replicas[chance.choice(sorted(world.replicas))]
            faults += [
                lambda: world.crash_engine(replica, is_bad=self._is_bad()),
                lambda: world.crash_engine(replica, is_bad=self._is_bad()),
                lambda: world.crash_service(replica),
                partial(self._crash_both, replica),
                lambda: world.cut(replica),
            ]
        out = [
            each
            for each in world.replicas.values()
            if each.life is not None and each.life.state is LifeState.QUARANTINED
        ]
        faults += [partial(world.crash_service, each) for each in out for _ in range(3)]
        return faults

    def _crash_both(self, replica: Replica) -> None:
        self.world.crash_service(replica)
        self.world.crash_engine(replica, is_bad=self._is_bad())

    def _takeover(self, end: Callable[[], None], control: Control) -> None:
        led = control.leads
        end()
        if led:
            other = next(each for each in self.world.controls if each is not control)
            self.world.after(self._chance.uniform(0.5, 8), partial(self._lead, other))

    def _lead(self, control: Control) -> None:
        """Let a process lead. Another leader steps down within a second, or once it runs again."""
        world = self.world
        if not control.is_up or control.is_paused:
            world.after(0.5, partial(self._lead, control))
            return
        world.lead(control)
        for each in world.controls:
            if each is not control and each.is_up and each.leads:
                down = partial(world.at, each, each.boots, partial(world.step_down, each))
                world.after(self._chance.uniform(0, 1), down)

    def _both_lead(self) -> None:
        self._lead(self._chance.choice(self.world.controls))

    def _lose_redis(self) -> None:
        self.world.has_redis = False
        self.world.after(self._chance.uniform(0.5, 8), self._find_redis)

    def _find_redis(self) -> None:
        self.world.has_redis = True

    def _delay(self) -> None:
        pools = sorted(self.world.delays) or ["default"]
        self.world.delays[self._chance.choice(pools)] = self._chance.choice((0.0, 0.0, 0.5, 1.5, 5.0))
        self.world.unplaced = {pool for pool in pools if self._chance.random() < 0.2}
        for replica in self.world.replicas.values():
            replica.queue_s = self._chance.choice((0.0, 0.5, 1.5))

    def _heal(self) -> None:
        """End all faults: one leader, good engines, no delay."""
        world = self.world
        world.jobs.has_faults, world.has_redis = False, True
        world.crash_loops.clear()
        world.run(world.now_s + 8)
        leaders = world.leaders()
        if len(leaders) != 1:
            self._lead(world.controls[0])
            world.run(world.now_s + 3)
        world.delays, world.unplaced = dict.fromkeys(world.delays, 0.0), set()
        for replica in world.replicas.values():
            replica.queue_s = 0.0
        for replica in world.replicas.values():
            is_out = replica.life is not None and replica.life.state is LifeState.QUARANTINED
            if replica.is_bad or is_out:
                world.crash_engine(replica)
