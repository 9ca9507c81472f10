"""Replays a workload against simulated prefill replicas, with every decision by placement policies. Pure.

A run is exact and repeatable: events happen in the order of their times, ties in the order of their creation. A policy gets
the events that a router gives it. Own dispatches come at once. Starts, finishes with the hit, other routers' dispatches and
changes of the caches come after `delay_s`. The hit of a prompt is its cached prefix when it starts. Its blocks can be
reused when it ends.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from kvmesh.queue_order import ORDERS
from services.router.forwarding.attempt import Submission
from services.router.forwarding.dispatcher import DISPATCH_PAUSE_S, Forecast
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.policy import (
    DISPATCH_LIFE_S,
    Dispatched,
    Finished,
    Hit,
    LoadReported,
    PlacementPolicy,
    PlacementRequest,
    PoolView,
    Removed,
    ReplicaLost,
    ReplicaState,
    Started,
    Stored,
    Wait,
)
from services.router.queue.queue_item import Ticket
from services.router.queue.release_queue import ReleaseQueue
from simulator.cost import Cost
from simulator.queued_request import QueuedRequest
from simulator.servers import Server, ServiceOrder
from simulator.workload import Workload

OUTPUT_TOKENS_MAX: Final = 1
"""The length of the output is not known in advance, and decode is not simulated."""

DECODE: Final = "decode"

SLOW_REPLICA: Final = 0
"""The replica that may be slower than the others."""


@runtime_checkable
class LocalIndexed(Protocol):
    """A policy with a local index of the caches. The simulation adds and drops its replicas, as the index reader does."""

    local_index: LocalPrefixIndex


@dataclass(frozen=True, slots=True)
class ReplicaOutage:
    """A replica is lost with its queue and its cache, and comes back empty."""

    replica: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """The simulated replicas."""

    replicas: int
    capacity: float
    """Blocks of cache per replica."""
    cost: Cost
    order: ServiceOrder = ServiceOrder.FIFO
    delay_s: float = 0.0
    """Delay until a router hears of events other than its own dispatches."""
    loss: float = 0.0
    """Share of the cache events that a router never hears."""
    slowness: float = 1.0
    """Factor on the prefill time at the first replica."""
    outages: Sequence[ReplicaOutage] = ()
    has_events: bool = True
    """False: engines without KV events. A router is told the size of their caches, and the hits."""
    unseen: float = 0.0
    """Blocks that each prompt leaves in the cache beside its own ones, over its own ones. Routers never match or hear of
    them: generated tokens, and requests of others."""

    def names(self) -> list[str]:
        """Return the replicas' names."""
        return [f"prefill-{index}" for index in range(self.replicas)]


@dataclass(frozen=True, slots=True)
class StartedWithHit(Started):
    """A start with the number of cached blocks, which a real router is not told."""

    cached_blocks: int = 0


@dataclass(slots=True)
class SimulationResult:
    """The results of each request, in the order of arrival, and of each replica."""

    ttft_s: list[float] = field(default_factory=list)
    hit_blocks: list[int] = field(default_factory=list)
    expected_blocks: list[int] = field(default_factory=list)
    """Hits that the router expected."""
    replica: list[int] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """By replica."""
    queued: int = 0
    """Requests that waited at a router first."""


@dataclass(slots=True)
class SimulatedRouter:
    """One router: its policy, and the requests that wait there."""

    name: str
    policy: PlacementPolicy
    queue: ReleaseQueue[QueuedRequest]
    not_before_s: float = float("-inf")
    """Earliest time of the next try to dispatch queued requests."""
    wake_s: float = float("inf")
    """Time of the next try by a timer."""


class Simulation:
    """One run. `policies`: one per router. Requests go to the routers in turn."""

    def __init__(
        self,
        load: Workload,
        scale: float,
        cluster: Cluster,
        policies: Sequence[PlacementPolicy],
        rng: random.Random,
    ) -> None:
        """`scale`: factor on arrival times. Policies with a name must be named router-0, router-1, ..."""
        self._load = load
        self._scale = scale
        self._cluster = cluster
        self._rng = rng
        self._names = cluster.names()
        self._index = {name: index for index, name in enumerate(self._names)}
        self._servers = [Server(cluster.capacity, cluster.order) for _ in self._names]
        self._states = [ReplicaState(name) for name in self._names]
        self._replicas = list(self._states)
        """The present replicas; replaced by a new list whenever one leaves or comes back."""
        self._decodes = [ReplicaState(DECODE)]
        count = len(load)
        self._ids = [f"{index:032x}" for index in range(count)]
        self._order = ORDERS[cluster.order.value]
        self._routers = [
            SimulatedRouter(f"router-{index}", policy, ReleaseQueue(count + 1))
            for index, policy in enumerate(policies)
        ]
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._made = 0
        self._has_events = cluster.has_events
        self._unseen_total = 0
        self._pending_events = 0
        """Future ends of prompts, and events on their way to routers."""
        self._now_s = 0.0
        self.result = SimulationResult([0.0] * count, [0] * count, [0] * count, [-1] * count)

    def run(self) -> SimulationResult:
        """Run until every request has had its first token."""
        heap, scale = self._heap, self._scale
        for index, at_s in enumerate(self._load.arrivals_s):
            heap.append((at_s * scale, index, self._arrive, (index,)))
        heapq.heapify(heap)
        self._made = len(heap)
        for outage in self._cluster.outages:
            self._at(outage.from_s, self._lose_replica, outage.replica)
            self._at(outage.until_s, self._restore_replica, outage.replica)
        for name in self._names:
            self._report_size(name)
        while heap:
            self._now_s, _, act, arguments = heapq.heappop(heap)
            act(*arguments)
        self.result.busy_s = [server.busy_s for server in self._servers]
        return self.result

    def _at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._made += 1
        heapq.heappush(self._heap, (at_s, self._made, act, arguments))

    # Routers

    def _arrive(self, index: int) -> None:
        router, tokens = self._router_of(index), self._load.tokens[index]
        queue = router.queue
        if not len(queue) and self._try(router, index) is None:
            return
        # A queued request is ordered as at the replicas, by its prefill time where most of it is in cache.
        work, seconds = tokens, 0.0
        if isinstance(router.policy, Forecast):  # other policies hold nothing back
            work, seconds = router.policy.expected(self._load.hashes[index], tokens, self._replicas)
        submitted = Submission(
            self._ids[index], 1, self._now_s, token_count=tokens, output_tokens_max=OUTPUT_TOKENS_MAX
        )
        queued = QueuedRequest(index, submitted, Ticket(work, self._order(seconds, self._now_s)))
        queue.add(queued)
        self._dispatch_queued(router)
        self.result.queued += bool(queued.ticket.number)

    def _router_of(self, index: int) -> SimulatedRouter:
        return self._routers[index % len(self._routers)]

    def _wake(self, router: SimulatedRouter) -> None:
        router.wake_s = float("inf")
        self._dispatch_queued(router)

    def _dispatch_queued(self, router: SimulatedRouter) -> None:
        """Release the requests that may go, as the router's dispatcher does.

        While events are pending, one of them will trigger the next try. No earlier try is needed.
        """
        queue, now_s = router.queue, self._now_s
        if not len(queue):
            return
        if now_s < router.not_before_s:
            self._wake_by(router, router.not_before_s)
            return
        is_any_dispatched = False
        while len(queue):
            again_s, has_dispatched = self._dispatch_heads(router)
            if not has_dispatched:
                if not self._pending_events:
                    self._wake_by(router, max(again_s, now_s + DISPATCH_PAUSE_S))
                break
            is_any_dispatched = True
        if not is_any_dispatched:
            router.not_before_s = now_s + DISPATCH_PAUSE_S

    def _dispatch_all(self) -> None:
        for router in self._routers:
            self._dispatch_queued(router)

    def _dispatch_heads(self, router: SimulatedRouter) -> tuple[float, bool]:
        """Try the heads of the queue. Return when to try again, and whether one of them was dispatched."""
        queue, again_s, has_dispatched = router.queue, float("inf"), False
        for queued in queue.heads():
            until_s = self._try(router, queued.index)
            if until_s is None:
                queue.release(queued, queued.ticket.work)
                has_dispatched = True
            else:
                again_s = min(again_s, until_s)
        return again_s, has_dispatched

    def _wake_by(self, router: SimulatedRouter, at_s: float) -> None:
        if at_s < router.wake_s:
            router.wake_s = at_s
            self._at(at_s, self._wake, router)

    def _try(self, router: SimulatedRouter, index: int) -> float | None:
        """Dispatch the request if the policy places it; else return when to ask again."""
        load, now_s = self._load, self._now_s
        hashes = load.hashes[index]
        request = PlacementRequest(
            self._ids[index],
            hashes,
            load.tokens[index],
            OUTPUT_TOKENS_MAX,
            waited_s=now_s - load.arrivals_s[index] * self._scale,
        )
        view = PoolView(self._replicas, self._decodes, max(0, len(router.queue) - 1))
        answer = router.policy.place(request, view, now_s)
        if isinstance(answer, Wait):
            return answer.until_s
        assert answer.prefill is not None, "decode's own prefill is not simulated"
        expires_s = now_s + DISPATCH_LIFE_S + 10 * answer.prefill_s
        dispatched = Dispatched(
            router.name,
            self._ids[index],
            answer.prefill,
            hashes,
            answer.prefill_s,
            now_s,
            expires_s,
            request.precedence,
            request.token_count,
            received_s=now_s + self._cluster.delay_s,
        )
        router.policy.observe(dispatched)
        if len(self._routers) > 1:
            self._at(now_s + self._cluster.delay_s, self._deliver_dispatch, router, dispatched)
        self.result.expected_blocks[index] = answer.matched_blocks
        self._submit(self._index[answer.prefill], index, answer.prefill_s)
        return None

    def _deliver_dispatch(self, by: SimulatedRouter, dispatched: Dispatched) -> None:
        for router in self._routers:
            if router is not by:
                router.policy.observe(dispatched)

    def _deliver(
        self,
        replica: int,
        generation: int,
        finished: Finished | None,
        stored: Stored | None,
        removed: Removed | None,
        started: StartedWithHit | None,
    ) -> None:
        """Deliver the events of one moment at a replica to all routers. Each router may miss the changes of the cache."""
        self._pending_events -= 1
        if self._servers[replica].generation != generation:  # lost since, with all its work
            self._dispatch_all()
            return
        loss, rng = self._cluster.loss, self._rng
        for router in self._routers:
            policy = router.policy
            if finished is not None:
                policy.observe(finished)
            if stored is not None and not (loss and rng.random() < loss):
                policy.observe(stored)
            if removed is not None and not (loss and rng.random() < loss):
                policy.observe(removed)
            if started is not None:
                policy.observe(started)
            self._dispatch_queued(router)

    def _publish(
        self,
        replica: int,
        finished: Finished | None,
        stored: Stored | None,
        removed: Removed | None,
        started: StartedWithHit | None,
    ) -> None:
        self._pending_events += 1
        generation = self._servers[replica].generation
        at_s = self._now_s + self._cluster.delay_s
        self._at(at_s, self._deliver, replica, generation, finished, stored, removed, started)

    # Replicas

    def _submit(self, replica: int, index: int, expected_s: float) -> None:
        self.result.replica[index] = replica
        server = self._servers[replica]
        if server.running is None:
            self._publish(replica, None, None, None, self._start(replica, index))
            return
        if not expected_s:  # a router that does not estimate: the replica looks at its cache
            expected_s = self._seconds(index, server.cache.depth(self._load.hashes[index]))
        server.push(index, expected_s, self._now_s)

    def _start(self, replica: int, index: int) -> StartedWithHit:
        server, now_s = self._servers[replica], self._now_s
        depth = server.cache.depth(self._load.hashes[index])
        seconds = self._seconds(index, depth) * self._load.noise[index]
        if replica == SLOW_REPLICA:
            seconds *= self._cluster.slowness
        server.running, server.hit_blocks = index, depth
        server.busy_s += seconds
        server.ends_s = now_s + seconds
        self._pending_events += 1
        self._at(server.ends_s, self._finish, replica, server.generation, index, seconds)
        return StartedWithHit(self._router_of(index).name, self._ids[index], now_s, depth)

    def _finish(self, replica: int, generation: int, index: int, seconds: float) -> None:
        server, load, now_s = self._servers[replica], self._load, self._now_s
        self._pending_events -= 1
        if server.generation != generation:
            self._dispatch_all()
            return
        name = self._names[replica]
        depth = server.hit_blocks
        self.result.ttft_s[index] = now_s - load.arrivals_s[index] * self._scale
        self.result.hit_blocks[index] = depth
        unseen = self._unseen(round(self._cluster.unseen * len(load.hashes[index])))
        evicted = server.cache.use(unseen)[1]
        added, more = server.cache.use(load.hashes[index])
        evicted += more
        cached = min(depth * load.block_tokens, load.tokens[index] - 1)
        finished = Finished(
            self._router_of(index).name,
            self._ids[index],
            now_s,
            Hit(cached, load.tokens[index] - cached, depth, seconds),
        )
        server.running = None
        started = self._start(replica, server.pop()) if len(server) else None
        stored = Stored(name, added) if added and self._has_events else None
        evicted = [value for value in evicted if value >= 0]
        removed = Removed(name, evicted) if evicted and self._has_events else None
        self._publish(replica, finished, stored, removed, started)

    def _lose_replica(self, replica: int) -> None:
        """Lose a replica. All routers know at once, and place its requests again."""
        name = self._names[replica]
        self._replicas = [one for one in self._replicas if one.name != name]
        lost = self._servers[replica].lose(self._now_s)
        for router in self._routers:
            router.policy.observe(ReplicaLost(name))
            if isinstance(router.policy, LocalIndexed):
                router.policy.local_index.drop(name)
        for index in lost:
            self._arrive(index)

    def _restore_replica(self, replica: int) -> None:
        for router in self._routers:
            if isinstance(router.policy, LocalIndexed):
                router.policy.local_index.add(self._names[replica])
        self._report_size(self._names[replica])
        here = {one.name for one in self._replicas} | {self._names[replica]}
        self._replicas = [one for one in self._states if one.name in here]
        self._dispatch_all()

    def _unseen(self, count: int) -> list[int]:
        """Return `count` new blocks, apart from those of the workload."""
        self._unseen_total += count
        return [-value for value in range(self._unseen_total - count + 1, self._unseen_total + 1)]

    def _report_size(self, name: str) -> None:
        """Tell the routers the size of a cache that has no events, as the load reports of its replica do."""
        if self._has_events:
            return
        size = max(1, int(self._cluster.capacity))
        for router in self._routers:
            router.policy.observe(LoadReported(name, 0, 0, self._now_s, believed_blocks_max=size))

    def _seconds(self, index: int, depth: int) -> float:
        total = self._load.tokens[index]
        return self._cluster.cost.seconds(total - depth * self._load.block_tokens, total)
