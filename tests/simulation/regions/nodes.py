"""The simulated parts of a region: its control process, routers with grants, frontends with shares, and its replicas."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from controlplane.regions.declared import SERVING, Declared
from controlplane.regions.observed import State
from controlplane.regions.regions import Regions
from kvmesh.regions.bucket import GrantBucket
from kvmesh.regions.quantity import Quantity, total
from kvmesh.regions.targets import Targets

BLOCK_TOKENS = 16.0
RUN_S = 2.0
"""Time for which a request holds its blocks."""
WALL_S = 1_700_000_000.0


@dataclass
class Redis:
    """Memory of a region outside of its control process."""

    declared: Declared = SERVING
    observed: dict[str, tuple[State, float, str]] = field(default_factory=dict)
    """States of the last snapshot."""


class Router:
    """A router: one bucket for each source region."""

    def __init__(self, name: str, sources: list[str], now_s: float) -> None:
        self.name = name
        self.buckets = {source: GrantBucket(now_s) for source in sources}
        self.recent = dict.fromkeys(sources, 0.0)
        """Guests' tokens since the last split, by source; halved at each."""
        self._running: deque[tuple[float, str, float]] = deque()

    def admit(self, source: str, tokens: float, blocks: float, now_s: float) -> bool:
        """Charge a guest's prompt; True if the grant covers it."""
        while self._running and self._running[0][0] <= now_s:
            _, of, held = self._running.popleft()
            self.buckets[of].release(held)
        if self.buckets[source].charge(tokens, blocks, now_s) is not None:
            return False
        self.recent[source] += tokens
        self._running.append((now_s + RUN_S, source, blocks))
        return True


class Control:
    """The control process of a region. Its memory is `regions`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.boot = 0
        self.is_up = False
        self.paused_until_s = 0.0
        self.wall_offset_s = 0.0
        self.regions: Regions = None  # type: ignore[assignment]  # set by World.start
        self.seedings: dict[str, float] = {}
        """Time at which the seeding of a target ends."""
        self.beat = 0
        self.stepped_s = 0.0


class Region:
    """A region: the truth about it, beside all observations."""

    def __init__(self, name: str, others: list[str], rng: random.Random, now_s: float) -> None:
        self.name = name
        self.others = others
        self.control = Control(name)
        self.redis = Redis()
        self.routers = [Router(f"{name}-router-{n}", others, now_s) for n in range(rng.randrange(1, 3))]
        self.targets = Targets(name, others, {})
        """Choice of the frontends: the last shares, also without a control process."""
        self.shares: dict[str, float] = {}
        """Shares of `targets`."""
        self.is_alive = True
        """False: neither frontends nor routers answer."""
        self.replicas = rng.choice((1, 2, 3, 4))
        self.serving = self.replicas
        self.slowness = 1.0
        self.failure_share = 0.0
        self.full_capacity = Quantity(rng.choice((600.0, 1000.0, 1500.0)), 2000.0)
        self.hit_ratio = rng.choice((0.0, 0.5, 0.8))
        self.base_load = self.full_capacity.tokens_per_s * rng.uniform(0.1, 0.5)
        self.load_factor = 1.0
        self.engines_since_s = now_s - rng.choice((10.0, 1e6, 1e6))
        self.backlog = 0.0
        """Admitted tokens that wait, in tokens."""
        self.guests = dict.fromkeys(others, 0.0)
        """Smoothed load of guests in tokens/s, by home."""
        self.changed_s = now_s
        """Time of the last change of load or capacity."""
        self.attempts = 0
        self.failures = 0

    @property
    def capacity(self) -> Quantity:
        """Capacity of the replicas that serve."""
        return self.full_capacity * (self.serving / self.replicas / self.slowness)

    @property
    def load(self) -> Quantity:
        """Offered load of its own callers with the cache hits of home."""
        tokens_per_s = self.base_load * self.load_factor
        return Quantity(tokens_per_s, tokens_per_s / (1 - self.hit_ratio) / BLOCK_TOKENS * RUN_S)

    def enforced(self, source: str) -> Quantity:
        """Return the grant that its routers enforce for a source."""
        return total(router.buckets[source].grant for router in self.routers)
