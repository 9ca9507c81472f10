"""Policies that look at no cache: random, round robin, least outstanding requests, the better of two. Pure.

The better of two: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
"""

from __future__ import annotations

from simulator.rivals.base import PlacementQuery, PolicySetup, Rival


class Random(Rival):
    """Any replica."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return any."""
        return self.rng.choice(query.replicas).name


class RoundRobin(Rival):
    """One after the other; each router begins elsewhere."""

    uses_index = False

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._turn = self.rng.randrange(len(setup.names))

    def choose(self, query: PlacementQuery) -> str:
        """Return the next."""
        self._turn += 1
        return query.replicas[self._turn % len(query.replicas)].name


class LeastOutstanding(Rival):
    """The replica with the fewest unfinished requests."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return the one with the fewest."""
        return self.lowest({one.name: len(self.loads[one.name].prompts) for one in query.replicas})


class PowerOfTwo(Rival):
    """Of two random replicas the one with fewer unfinished requests."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return the better of two."""
        two = self.rng.sample(list(query.replicas), min(2, len(query.replicas)))
        return self.lowest({one.name: len(self.loads[one.name].prompts) for one in two})
