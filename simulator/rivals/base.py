"""Base of the simulated policies: a router's view of its replicas by the events that it hears. Pure."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.policy import (
    Dispatched,
    Event,
    Finished,
    Placement,
    PlacementRequest,
    PoolView,
    Removed,
    ReplicaLost,
    ReplicaState,
    Started,
    Stored,
)
from simulator.cost import Cost
from simulator.servers import ServiceOrder

TIE: Final = 1e-12


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """Constructor arguments of a policy."""

    names: list[str]
    capacity: float
    """Blocks of cache per replica."""
    block_tokens: int
    cost: Cost
    """The true costs, which these policies need not learn."""
    rng: random.Random
    router: str = "router-0"
    dispatch_ahead_s: float = float("inf")
    order: ServiceOrder = ServiceOrder.FIFO
    """Order of service at the replicas."""


@dataclass(slots=True)
class DispatchedPrompt:
    """One dispatched prompt that has not finished, as far as is known."""

    event: Dispatched
    tokens: int
    """0: unknown, for a dispatch of another router."""
    uncached: int
    prefill_s: float
    started_s: float | None = None


@dataclass(slots=True)
class KnownLoad:
    """The work of one replica, as far as is known."""

    prompts: dict[tuple[str, str], DispatchedPrompt] = field(default_factory=dict)

    def queued(self) -> int:
        """Return the number of prompts that have not started."""
        return sum(prompt.started_s is None for prompt in self.prompts.values())

    def queue_s(self, now_s: float) -> float:
        """Return the remaining seconds of work."""
        total = 0.0
        for prompt in self.prompts.values():
            if prompt.started_s is None:
                total += prompt.prefill_s
            else:
                total += max(0.0, prompt.started_s + prompt.prefill_s - now_s)
        return total

    def blocks(self) -> int:
        """Return the blocks of the prompts."""
        return sum(len(prompt.event.hashes) for prompt in self.prompts.values())

    def uncached(self) -> int:
        """Return the tokens to compute."""
        return sum(prompt.uncached for prompt in self.prompts.values())


class PlacementQuery(NamedTuple):
    """A request, and the replicas to choose from."""

    request: PlacementRequest
    replicas: Sequence[ReplicaState]
    depths: dict[str, int]
    """Leading blocks cached, by name; replicas with 0 are absent."""
    now_s: float


class Rival(ABC):
    """A policy that dispatches at once. Subclasses override `choose`, and may handle more events."""

    uses_index = True
    """False skips the maintenance of a local index."""
    learns_at_start = True
    """True: a start reports the cached tokens, so that the remaining prefill time is known, except for noise."""
    counts_in_flight = False
    """True: the blocks of dispatched and unfinished prompts count as cached."""

    def __init__(self, setup: PolicySetup) -> None:
        self.setup = setup
        self.rng = setup.rng
        self.cost = setup.cost
        self.loads: dict[str, KnownLoad] = {name: KnownLoad() for name in setup.names}
        self.local_index = LocalPrefixIndex()
        for name in setup.names:
            self.local_index.add(name)
        self._replica_of: dict[tuple[str, str], str] = {}
        self._chosen: dict[str, tuple[int, int]] = {}
        """Request -> its tokens, and its uncached tokens when it was placed here."""

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement:
        """Place by `choose`."""
        depths = self.local_index.matched(request.hashes) if self.uses_index else {}
        name = self.choose(PlacementQuery(request, view.prefill, depths, now_s))
        depth = depths.get(name, 0)
        uncached = max(1, request.token_count - depth * self.setup.block_tokens)
        seconds = self.cost.seconds(uncached, request.token_count) if self.uses_index else 0.0
        self._chosen[request.request_id] = request.token_count, uncached
        return Placement(name, view.decode[0].name, depth, seconds, seconds)

    @abstractmethod
    def choose(self, query: PlacementQuery) -> str:
        """Return the name of the replica that runs the request."""

    def lowest(self, scores: dict[str, float]) -> str:
        """Return the name with the lowest score, a random one among equals."""
        best = min(scores.values())
        names = [name for name, score in scores.items() if score <= best + TIE]
        return names[0] if len(names) == 1 else self.rng.choice(names)

    def prefill_s(self, request: PlacementRequest, depth: int) -> float:
        """Return the prefill seconds with `depth` blocks cached."""
        return self.cost.seconds(request.token_count - depth * self.setup.block_tokens, request.token_count)

    def observe(self, event: Event) -> None:
        """Update the view by an event."""
        match event:
            case Dispatched():
                self.dispatched(event)
            case Started():
                prompt = self._job(event.router, event.request_id)
                if prompt is not None:
                    prompt.started_s = event.at_s
                    self._correct(prompt, getattr(event, "cached_blocks", None))
            case Finished():
                self.finished(event)
            case Stored() if self.uses_index:
                self.local_index.store(event.replica, event.hashes)
            case Removed() if self.uses_index:
                self.local_index.remove(event.replica, event.hashes)
            case ReplicaLost():
                self.lost(event.replica)

    def dispatched(self, event: Dispatched) -> None:
        """Record a dispatch of this router or another one."""
        tokens, uncached = self._chosen.pop(event.request_id, (0, 0))
        if not tokens:
            tokens = len(event.hashes) * self.setup.block_tokens
            uncached = tokens
            if self.uses_index:
                depth = self.local_index.matched(event.hashes).get(event.replica, 0)
                uncached = max(1, tokens - depth * self.setup.block_tokens)
        prompt = DispatchedPrompt(event, tokens, uncached, event.prefill_s)
        self.loads[event.replica].prompts[event.router, event.request_id] = prompt
        self._replica_of[event.router, event.request_id] = event.replica
        if self.counts_in_flight:
            self.local_index.add_in_flight(event.replica, event.hashes)

    def finished(self, event: Finished) -> None:
        """Record that a prompt was computed."""
        replica = self._replica_of.pop((event.router, event.request_id), None)
        if replica is not None:
            prompt = self.loads[replica].prompts.pop((event.router, event.request_id))
            if self.counts_in_flight:
                self.local_index.remove_in_flight(replica, prompt.event.hashes)

    def lost(self, replica: str) -> None:
        """Forget the queue and the cache of a lost replica, which may come back empty."""
        for key, prompt in self.loads.pop(replica).prompts.items():
            del self._replica_of[key]
            if self.counts_in_flight:
                self.local_index.remove_in_flight(replica, prompt.event.hashes)
        self.loads[replica] = KnownLoad()

    def _job(self, router: str, request_id: str) -> DispatchedPrompt | None:
        replica = self._replica_of.get((router, request_id))
        return self.loads[replica].prompts[router, request_id] if replica is not None else None

    def _correct(self, prompt: DispatchedPrompt, cached_blocks: int | None) -> None:
        if cached_blocks is not None and self.uses_index and self.learns_at_start:
            prompt.uncached = max(1, prompt.tokens - cached_blocks * self.setup.block_tokens)
            prompt.prefill_s = self.cost.seconds(prompt.uncached, prompt.tokens)
