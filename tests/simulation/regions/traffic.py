"""Callers of simulated regions: some pinned to regions, guests of dead ones, and a queue in each region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmesh.regions.targets import SPAN
from tests.simulation.regions.nodes import BLOCK_TOKENS, Region

if TYPE_CHECKING:
    from tests.simulation.regions.world import World

REQUESTS_PER_S = 4
PINNED_SHARE = 0.2
GUEST_BACKLOG_S = 10.0
"""Backlog, in seconds of capacity, above which guests are shed; own callers are shed above OWN_BACKLOG_S."""
OWN_BACKLOG_S = 14.0
ATTEMPTS_PER_REQUEST = 4
"""Attempts that one simulated request stands for, in the success rate alone."""


class Traffic:
    """Sends the requests of each second."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.served = 0
        self.spilled = 0
        self.guests = 0
        self.refused = 0

    def tick(self) -> None:
        """Serve a second of backlog, then send a second of requests."""
        for region in self.world.regions.values():
            region.backlog = max(0.0, region.backlog - region.capacity.tokens_per_s)
            for name in region.guests:
                region.guests[name] *= 0.5
        for region in self.world.regions.values():
            for _ in range(REQUESTS_PER_S):
                self._send(region, region.load.tokens_per_s / REQUESTS_PER_S)

    def _send(self, home: Region, uncached: float) -> None:
        allowed: tuple[str, ...] | None = None
        if self.rng.random() < PINNED_SHARE:
            allowed = (home.name, self.rng.choice(self.world.names))
        if not home.is_alive:
            self._visit(home, uncached, allowed)
            return
        at = self.rng.randrange(SPAN)
        target = home.targets.choose(at, allowed)
        if target != home.name and self._send_away(home, self.world.regions[target], uncached, allowed):
            self.spilled += 1
            return
        self._serve_at_home(home, uncached)

    def _visit(self, home: Region, uncached: float, allowed: tuple[str, ...] | None) -> None:
        """A client of a dead region goes to another region's frontends. That region never sends it on."""
        for name in home.others:
            region = self.world.regions[name]
            if region.is_alive and (allowed is None or name in allowed):
                if self._send_away(home, region, uncached, allowed, is_visit=True):
                    self.guests += 1
                    return
                break
        self.refused += 1

    def _send_away(
        self,
        home: Region,
        target: Region,
        uncached: float,
        allowed: tuple[str, ...] | None,
        *,
        is_visit: bool = False,
    ) -> bool:
        if not is_visit and not self.world.reaches(home.name, target.name):
            return False
        tokens = uncached / (1 - home.hit_ratio)
        blocks = tokens / BLOCK_TOKENS
        router = self.rng.choice(target.routers)
        if not router.admit(home.name, tokens, blocks, self.world.now_s):
            return False
        self.world.checkers.on_guest(target.name, home.name, tokens, allowed)
        if target.backlog > GUEST_BACKLOG_S * target.capacity.tokens_per_s:
            self.world.checkers.on_shed_guest(target)
            return False
        computed = tokens * self.rng.uniform(0.5, 1.0)
        router.buckets[home.name].correct(tokens, computed)
        self.world.checkers.on_corrected(target.name, home.name, tokens - computed)
        target.backlog += computed
        target.guests[home.name] += computed / 2
        self._count(target)
        return True

    def _serve_at_home(self, home: Region, uncached: float) -> None:
        if home.backlog > OWN_BACKLOG_S * home.capacity.tokens_per_s:
            self.world.checkers.on_shed_own(home)
            self.refused += 1
            return
        home.backlog += uncached
        self.served += 1
        self._count(home)

    def _count(self, region: Region) -> None:
        region.attempts += ATTEMPTS_PER_REQUEST
        if region.failure_share:
            region.failures += sum(
                self.rng.random() < region.failure_share for _ in range(ATTEMPTS_PER_REQUEST)
            )
