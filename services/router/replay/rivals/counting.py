"""Policies that look at no cache: random, round robin, least outstanding requests, the better of two. Pure.

The better of two: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.policy import PlacementRequest, ReplicaState
from services.router.replay.rivals.seen import Given, Rival


class Random(Rival):
    """Any replica."""

    uses_index = False

    def choose(
        self,
        request: PlacementRequest,
        replicas: Sequence[ReplicaState],
        depths: dict[str, int],
        now_s: float,
    ) -> str:
        """Return any."""
        return self.rng.choice(replicas).name


class RoundRobin(Rival):
    """One after the other; each router begins elsewhere."""

    uses_index = False

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self._turn = self.rng.randrange(len(given.names))

    def choose(
        self,
        request: PlacementRequest,
        replicas: Sequence[ReplicaState],
        depths: dict[str, int],
        now_s: float,
    ) -> str:
        """Return the next."""
        self._turn += 1
        return replicas[self._turn % len(replicas)].name


class LeastOutstanding(Rival):
    """The replica with the fewest unfinished requests."""

    uses_index = False

    def choose(
        self,
        request: PlacementRequest,
        replicas: Sequence[ReplicaState],
        depths: dict[str, int],
        now_s: float,
    ) -> str:
        """Return the one with the fewest."""
        return self.lowest({one.name: len(self.loads[one.name].jobs) for one in replicas})


class PowerOfTwo(Rival):
    """Of two random replicas the one with fewer unfinished requests."""

    uses_index = False

    def choose(
        self,
        request: PlacementRequest,
        replicas: Sequence[ReplicaState],
        depths: dict[str, int],
        now_s: float,
    ) -> str:
        """Return the better of two."""
        two = self.rng.sample(list(replicas), min(2, len(replicas)))
        return self.lowest({one.name: len(self.loads[one.name].jobs) for one in two})
