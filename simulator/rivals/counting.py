"""Policies that ignore caches: random, round robin, least outstanding requests, power of two choices. Pure.

Power of two choices: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
"""

from __future__ import annotations

from simulator.rivals.base import PlacementQuery, PolicySetup, Rival


class Random(Rival):
    """A random replica."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return a random replica."""
        return self.rng.choice(query.replicas).name


class RoundRobin(Rival):
    """The replicas in turn. Each router begins at another one."""

    uses_index = False

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._turn = self.rng.randrange(len(setup.names))

    def choose(self, query: PlacementQuery) -> str:
        """Return the next replica."""
        self._turn += 1
        return query.replicas[self._turn % len(query.replicas)].name


class LeastOutstanding(Rival):
    """The replica with the fewest unfinished requests."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the fewest."""
        return self.lowest({one.name: len(self.loads[one.name].prompts) for one in query.replicas})


class PowerOfTwo(Rival):
    """The replica with fewer unfinished requests of two random ones."""

    uses_index = False

    def choose(self, query: PlacementQuery) -> str:
        """Return the less loaded of two."""
        two = self.rng.sample(list(query.replicas), min(2, len(query.replicas)))
        return self.lowest({one.name: len(self.loads[one.name].prompts) for one in two})
