"""Policies that look at no cache: random, round robin, least outstanding requests, the better of two. Pure.

The better of two: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
"""

from __future__ import annotations

from simulator.rivals.seen import Asked, Given, Rival


class Random(Rival):
    """Any replica."""

    uses_index = False

    def choose(self, asked: Asked) -> str:
        """Return any."""
        return self.rng.choice(asked.replicas).name


class RoundRobin(Rival):
    """One after the other; each router begins elsewhere."""

    uses_index = False

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._turn = self.rng.randrange(len(given.names))

    def choose(self, asked: Asked) -> str:
        """Return the next."""
        self._turn += 1
        return asked.replicas[self._turn % len(asked.replicas)].name


class LeastOutstanding(Rival):
    """The replica with the fewest unfinished requests."""

    uses_index = False

    def choose(self, asked: Asked) -> str:
        """Return the one with the fewest."""
        return self.lowest({one.name: len(self.loads[one.name].jobs) for one in asked.replicas})


class PowerOfTwo(Rival):
    """Of two random replicas the one with fewer unfinished requests."""

    uses_index = False

    def choose(self, asked: Asked) -> str:
        """Return the better of two."""
        two = self.rng.sample(list(asked.replicas), min(2, len(asked.replicas)))
        return self.lowest({one.name: len(self.loads[one.name].jobs) for one in two})
