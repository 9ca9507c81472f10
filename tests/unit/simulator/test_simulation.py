"""The simulation loses and repeats no work, and the same seed gives the same run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmesh.queue_order import ORDERS
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import (
    Dispatched,
    Event,
    Finished,
    LoadReported,
    Placement,
    PlacementRequest,
    PoolView,
    Removed,
    ReplicaLost,
    ReplicaState,
    Started,
    Stored,
    Wait,
)
from simulator.catalogue import POLICIES
from simulator.cost import COSTS, Cost
from simulator.lru import BlockCache
from simulator.pooled import bound, capacity_of, pool, scale_for
from simulator.processes import Runner, Task
from simulator.runs import BOUND, Replay, ReplayRow
from simulator.servers import ServiceOrder
from simulator.simulation import Cluster, ReplicaOutage, Simulation, SimulationResult
from simulator.workload import Workload, workload
from tests.unit.overtaking import overtaken_s
from tests.unit.simulator import small

FLAT = Cost("flat", 0.0, 1e-3, 0.0)
"""One millisecond per token, so that figures can be computed by hand."""


class Watcher:
    """Places requests at random, some of them later, and records the events it receives."""

    def __init__(self, rng: random.Random, wait_share: float) -> None:
        self.told: list[Event] = []
        self.asked = 0
        self._rng = rng
        self._wait_share = wait_share

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose any replica, or none."""
        self.asked += 1
        if self._rng.random() < self._wait_share:
            return Wait("not now", now_s + 0.05)
        return Placement(self._rng.choice(view.prefill).name, view.decode[0].name, 0, 0.1, 0.1)

    def observe(self, event: Event) -> None:
        """Record the event."""
        self.told.append(event)


def run(
    load: Workload, cluster: Cluster, policies: Sequence[Watcher], scale: float = 1.0
) -> tuple[SimulationResult, Sequence[Watcher]]:
    """Run the simulation once."""
    return Simulation(load, scale, cluster, policies, random.Random(0)).run(), policies


class OneAtATime(Watcher):
    """Holds requests at the router while any runs, and states their expected cost."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 0.0)
        self.open = 0

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose any replica if nothing runs."""
        return Wait("something runs", now_s + 0.05) if self.open else super().place(request, view, now_s)

    def observe(self, event: Event) -> None:
        """Count the running requests."""
        super().observe(event)
        self.open += isinstance(event, Dispatched) - isinstance(event, Finished)

    def knows_costs(self) -> bool:
        """Return True."""
        return True

    def may_refuse(self, now_s: float) -> bool:
        """Return True."""
        return True

    def is_fresh(self, now_s: float) -> bool:
        """Return True."""
        return True

    def expected(
        self, hashes: Sequence[int], token_count: int, prefill: Sequence[ReplicaState]
    ) -> tuple[int, float]:
        """Return the cost without any cached block."""
        return token_count, FLAT.seconds(token_count, token_count)


@pytest.mark.parametrize("order", list(ServiceOrder))
def test_held_requests_go_in_the_order_of_the_router(order: ServiceOrder) -> None:
    """Held requests are dispatched in the router's order: shortest first with aging, or first in, first out.

    The replica's own order does not matter, since nothing waits there.
    """
    load = workload(small.trace(5, requests=80), 5)
    result, (router,) = run(load, Cluster(1, 61, FLAT, order), [OneAtATime()], scale=0.02)
    assert result.queued > 60
    key, scaled = ORDERS[order.value], [at_s * 0.02 for at_s in load.arrivals_s]
    sent = [(int(one.request_id, 16), one.at_s) for one in router.told if isinstance(one, Dispatched)]
    keys = [key(FLAT.seconds(tokens, tokens), at_s) for tokens, at_s in zip(load.tokens, scaled, strict=True)]
    overtaken = 0
    for place, (index, at_s) in enumerate(sent):
        later = [other for other, _ in sent[place + 1 :] if scaled[other] < at_s]
        assert all(keys[index] <= keys[other] for other in later)
        overtaken += any(scaled[other] < scaled[index] for other in later)
    assert (overtaken > 5) is (order is ServiceOrder.SHORTEST), overtaken


@pytest.mark.parametrize("seed", range(12))
def test_every_request_starts_and_ends_once(seed: int) -> None:
    """Every request starts and ends once under any policy, delay, order and number of routers."""
    rng = random.Random(seed)
    load = workload(small.trace(seed, requests=120), seed)
    cluster = Cluster(
        rng.randint(1, 5),
        rng.randint(61, 400),
        COSTS["8b"],
        rng.choice(list(ServiceOrder)),
        delay_s=rng.choice([0.0, 0.01, 0.5]),
        loss=rng.choice([0.0, 0.3]),
    )
    routers = [Watcher(rng, rng.choice([0.0, 0.5])) for _ in range(rng.randint(1, 4))]
    result, _ = run(load, cluster, routers, scale=rng.choice([0.02, 1.0]))
    assert all(0 <= one < cluster.replicas for one in result.replica)
    least = [cluster.cost.seconds(1, 1) * noise for noise in load.noise]
    assert all(seconds >= low * 0.999 for seconds, low in zip(result.ttft_s, least, strict=True))
    work = 0.0
    for tokens, depth, noise in zip(load.tokens, result.hit_blocks, load.noise, strict=True):
        work += cluster.cost.seconds(tokens - depth * load.block_tokens, tokens) * noise
    assert sum(result.busy_s) == pytest.approx(work)
    for router in routers:
        kinds = (Dispatched, Started, Finished)
        for kind in kinds:
            heard = [event.request_id for event in router.told if isinstance(event, kind)]
            assert len(heard) == len(set(heard)) == len(load), kind
        at: dict[str, list[type]] = {}
        for event in router.told:
            if isinstance(event, kinds):
                at.setdefault(event.request_id, []).append(type(event))
        assert all([one.__mro__[-2] for one in seen] == [*kinds] for seen in at.values())


def test_cache_events_match_the_contents_of_caches() -> None:
    """A set kept from stored and removed blocks predicts every hit at its start, without loss."""
    load = workload(small.trace(3), 3)
    cluster = Cluster(3, 90, COSTS["8b"])
    result, (router,) = run(load, cluster, [Watcher(random.Random(3), 0.0)])
    held: dict[str, set[int]] = {name: set() for name in cluster.names()}
    index = {f"{number:032x}": number for number in range(len(load))}
    where: dict[str, str] = {}
    finished = 0
    for event in router.told:
        if isinstance(event, Dispatched):
            where[event.request_id] = event.replica
        elif isinstance(event, Stored):
            assert not held[event.replica] & set(event.hashes)
            held[event.replica] |= set(event.hashes)
        elif isinstance(event, Removed):
            assert set(event.hashes) <= held[event.replica]
            held[event.replica] -= set(event.hashes)
        elif isinstance(event, Finished):
            finished += 1
            assert event.hit is not None
            number = index[event.request_id]
            assert event.hit.cached_blocks == result.hit_blocks[number]
            assert event.hit.cached_tokens + event.hit.computed_tokens == load.tokens[number]
    assert finished == len(load)
    assert all(len(blocks) <= 90 for blocks in held.values())


def by_hand(arrivals_s: list[float], tokens: list[int]) -> Workload:
    """Return requests without shared blocks and noise."""
    hashes = [
        tuple(1000 * index + one for one in range(-(-count // 512))) for index, count in enumerate(tokens)
    ]
    return Workload(arrivals_s, tokens, hashes, [1.0] * len(tokens), sum(map(len, hashes)), 8, 512)


@pytest.mark.parametrize(
    ("order", "ttft"), [(ServiceOrder.FIFO, [4.0, 6.9, 7.3]), (ServiceOrder.SHORTEST, [4.0, 7.4, 4.3])]
)
def test_queues_by_hand(order: ServiceOrder, ttft: list[float]) -> None:
    """The times to first token on one replica equal those computed by hand.

    A prompt of 4 s runs while prompts of 3 s and 0.5 s wait. The shortest goes first, or last.
    """
    load = by_hand([0.0, 0.1, 0.2], [4000, 3000, 500])
    cluster = Cluster(1, 100, FLAT, order)
    # The policy expects 0.1 s of everything; a replica without information measures for itself.
    policy = Watcher(random.Random(1), 0.0)
    policy.place = lambda request, view, now_s: Placement("prefill-0", "decode", 0, 0.0, 0.0)  # type: ignore[method-assign]
    result, _ = run(load, cluster, [policy])
    assert result.ttft_s == pytest.approx(ttft)


def test_a_held_request_is_placed_again() -> None:
    """A held request is placed again at the time that the policy named, if no event comes before."""
    policy = Watcher(random.Random(1), 0.0)
    place = policy.place

    def patient(request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        return Wait("too soon", now_s + 0.05) if now_s < 0.12 else place(request, view, now_s)

    policy.place = patient  # type: ignore[method-assign]
    result, _ = run(by_hand([0.0], [1000]), Cluster(2, 100, FLAT), [policy])
    assert result.ttft_s == pytest.approx([0.15 + 1.0]) and result.queued == 1


def test_other_routers_get_dispatches_late() -> None:
    """A router knows its own dispatch at once, and the others after the delay.

    A finish reports the measured seconds to all routers, as the gossip messages between routers do
    (services/router/gossip/dispatch_gossip.py).
    """
    load = by_hand([0.0, 10.0], [1000, 1000])
    routers = [Watcher(random.Random(1), 0.0), Watcher(random.Random(2), 0.0)]
    run(load, Cluster(2, 100, FLAT, delay_s=0.25), routers)
    own = [type(event).__mro__[-2] for event in routers[0].told[:3]]
    assert own == [Dispatched, Started, Finished]
    assert routers[0].told[0] == routers[1].told[0]
    hits = [[event.hit for event in router.told if isinstance(event, Finished)] for router in routers]
    for heard in hits:
        assert [hit is not None and hit.prefill_s for hit in heard] == pytest.approx([1.0, 1.0])
        assert [hit is not None and hit.computed_tokens for hit in heard] == [1000, 1000]


def test_a_lost_replica_loses_its_queue_and_its_cache_and_returns_empty() -> None:
    """Requests of a lost replica are placed again at once; the replica returns with an empty cache.

    Their times count from the first arrival. The replica is used again.
    """
    load = by_hand([0.0, 1.0, 20.0], [4000, 4000, 4000])
    away = ReplicaOutage(0, 2.0, 10.0)
    policy = Watcher(random.Random(0), 0.0)
    places = iter([0, 0, 1, 1, 0])
    policy.place = lambda request, view, now_s: (  # type: ignore[method-assign]
        Placement(f"prefill-{next(places)}", view.decode[0].name, 0, 4.0, 4.0)
    )
    result, _ = run(load, Cluster(2, 100, FLAT, outages=[away]), [policy])
    assert result.ttft_s == pytest.approx([2.0 + 4.0, 1.0 + 4.0 + 4.0, 4.0])
    assert result.busy_s == pytest.approx([2.0 + 4.0, 8.0])
    gone = [event for event in policy.told if isinstance(event, ReplicaLost)]
    assert gone == [ReplicaLost("prefill-0")]
    finished = [event.request_id for event in policy.told if isinstance(event, Finished)]
    assert len(finished) == len(set(finished)) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_goes_on_through_restarts(policy: str) -> None:
    """No request is lost under restarts, for every policy.

    News is exact or late, and requests are held back or not.
    """
    row = ReplayRow(3, 0.8, 0.3, order=ServiceOrder.SHORTEST, outage_s=5.0, dispatch_ahead_s=1.0)
    replay = Replay(small.trace(4))
    for one in (row, replace(row, routers=2, delay_s=0.1, loss=0.1)):
        assert 0 < replay.run(one, policy, 1).mean_s < float("inf")


def test_a_slow_replica_takes_longer_and_the_others_do_not() -> None:
    """The first replica takes longer by its factor, whatever the policy believes; the others do not."""
    load = by_hand([0.0, 10.0], [1000, 1000])
    policy = Watcher(random.Random(0), 0.0)
    places = iter([0, 1])
    policy.place = lambda request, view, now_s: (  # type: ignore[method-assign]
        Placement(f"prefill-{next(places)}", view.decode[0].name, 0, 1.0, 1.0)
    )
    result, _ = run(load, Cluster(2, 100, FLAT, slowness=2.0), [policy])
    assert result.ttft_s == pytest.approx([2.0, 1.0])


def test_loss_affects_only_cache_news() -> None:
    """Lost cache news does not affect the news of starts and finishes."""
    load = workload(small.trace(5), 5)
    _, (router,) = run(load, Cluster(2, 90, COSTS["8b"], loss=1.0), [Watcher(random.Random(5), 0.0)])
    assert not [event for event in router.told if isinstance(event, Stored | Removed)]
    assert sum(isinstance(event, Finished) for event in router.told) == len(load)


def test_work_of_the_pool_against_the_rule() -> None:
    """The pool's work W is the time of one cache that serves all requests in order.

    At load `load`, the trace lasts W / (N load).
    """
    load = workload(small.trace(2), 2)
    cost = COSTS["70b"]
    cache, work_s = BlockCache(100), 0.0
    for tokens, hashes in zip(load.tokens, load.hashes, strict=True):
        depth = next((index for index, one in enumerate(hashes) if one not in cache), len(hashes))
        uncached = max(1, tokens - 512 * depth)
        work_s += cost.c0_s + uncached * (cost.a_s + cost.b_s * (tokens - uncached / 2))
        cache.use(hashes)
    pooled = pool(load, 100, cost)
    assert pooled.work_s == pytest.approx(work_s)
    assert load.span_s * scale_for(load, pooled.work_s, 4, 0.7) == pytest.approx(work_s / (4 * 0.7))
    assert capacity_of(load, 0.0, 4) == load.longest_blocks + 16
    assert capacity_of(load, 1.0, 2) == max(load.longest_blocks + 16, load.unique_blocks // 2)


def test_one_queue_is_a_bound_by_hand() -> None:
    """The bound is one queue for two servers: the third request waits for the first free server."""
    load = by_hand([0.0, 0.0, 1.0], [4000, 2000, 1000])
    ttft_s, busy_s = bound(load, pool(load, 100, FLAT), 1.0, 2)
    assert ttft_s == pytest.approx([4.0, 2.0, 2.0])
    assert sorted(busy_s) == pytest.approx([3.0, 4.0])


@pytest.mark.parametrize("policy", [*POLICIES, BOUND])
def test_a_run_is_the_same_again(policy: str) -> None:
    """The row, policy and seed determine the run; another seed gives another run."""
    row = ReplayRow(
        3, 0.8, 0.3, order=ServiceOrder.SHORTEST, routers=2, delay_s=0.05, loss=0.1, dispatch_ahead_s=1.0
    )
    first = Replay(small.trace(4)).run(row, policy, 1)
    again = Replay(small.trace(4))
    again.run(replace(row, replicas=2), policy, 2)
    assert again.run(row, policy, 1) == first
    assert again.run(row, policy, 2) != first
    assert 0 < first.goodput <= 1 and 0 <= first.hit < 1 and first.imbalance >= 1


def test_processes_change_nothing() -> None:
    """Figures are equal for any number of processes."""
    traces = {"a": small.trace(6), "b": small.trace(7, requests=60)}
    tasks = [
        Task(trace, ReplayRow(2, load), policy, 1)
        for trace in traces
        for load in (0.5, 0.9)
        for policy in ("kvmesh", "random")
    ]
    found = []
    for prompts in (1, 3):
        seen: dict[Task, object] = {}
        runner = Runner(traces, prompts)
        try:
            runner.run(tasks, seen.__setitem__)
        finally:
            runner.close()
        found.append(seen)
    assert found[0] == found[1] and found[0].keys() == set(tasks)


def test_a_failing_run_is_named() -> None:
    """An error in a process is raised with the name of its task."""
    runner = Runner({"a": small.trace(6)}, 2)
    try:
        with pytest.raises(RuntimeError, match="no-such-policy"):
            runner.run([Task("a", ReplayRow(2), "no-such-policy", 1)], lambda *_: None)
    finally:
        runner.close()


@pytest.mark.parametrize("routers", [1, 2])
def test_a_long_prompt_goes_though_more_short_ones_come_than_can_be_served(routers: int) -> None:
    """A long prompt is served although more short prompts come than can be served.

    Short prompts fit beside the replica's waiting work and the long one does not. It is dispatched when its
    turn has come.
    """
    rng, arrivals_s, at_s = random.Random(3), list[float](), 0.0
    long_s, short_s, ahead_s, span_s = 3.0, 0.1, 1.0, 25.0
    while at_s < span_s:
        at_s += rng.expovariate(4 * 1.2 / short_s)
        arrivals_s.append(at_s)
    long = next(index for index, one in enumerate(arrivals_s) if one > 3.0)
    tokens = [3000 if index == long else 100 for index in range(len(arrivals_s))]
    hashes = [tuple(rng.getrandbits(64) for _ in range(count // 100)) for count in tokens]
    load = Workload(arrivals_s, tokens, hashes, [1.0] * len(tokens), 0, 30, 100)
    cluster = Cluster(4, 1e9, FLAT, ServiceOrder.SHORTEST, 0.002)
    policies = []
    for router in range(routers):
        local_index = LocalPrefixIndex()
        for name in cluster.names():
            local_index.add(name)
        policy = CostPolicy(
            f"router-{router}",
            local_index,
            random.Random(router),
            block_tokens=100,
            dispatch_ahead_s=ahead_s,
            local_prefill_tokens_max=0,
        )
        for count in (100, 3000) * 40:
            policy.costs.observe(count, count, count / 1000)
        policies.append(policy)
    result = Simulation(load, 1.0, cluster, policies, random.Random(2)).run()
    # The wait for its turn, the work waiting at the replica then, its own prefill; half as much again for the
    # rest.
    assert result.ttft_s[long] < 1.5 * (overtaken_s(long_s, short_s) + ahead_s + long_s) < span_s - 3.0


@pytest.mark.parametrize("unseen", [0.0, 0.5])
@pytest.mark.parametrize("outage_s", [0.0, 5.0])
def test_engines_without_events_are_hit_nearly_as_often(unseen: float, outage_s: float) -> None:
    """Without KV events kvmesh keeps 0.9 of the hits, few of them wrong, also if unknown blocks fill a third of a cache."""
    replay = Replay(small.trace(3, requests=600))
    row = ReplayRow(4, 0.8, 0.3, order=ServiceOrder.SHORTEST, unseen=unseen, outage_s=outage_s)
    events = replay.run(row, "kvmesh", 1)
    none = replay.run(replace(row, has_events=False), "kvmesh", 1)
    assert none.hit >= 0.9 * events.hit > 0.1
    assert none.wrong <= events.wrong + 0.05


def test_without_events_no_router_hears_of_a_cache() -> None:
    """Routers hear the size of a cache, and hits; unknown blocks are never heard of, with or without events."""
    load = workload(small.trace(1), 1)
    for has_events in (True, False):
        watcher = Watcher(random.Random(1), 0.0)
        cluster = Cluster(2, 40, FLAT, has_events=has_events, unseen=0.5)
        Simulation(load, 1.0, cluster, [watcher], random.Random(1)).run()
        news = [event for event in watcher.told if isinstance(event, Stored | Removed)]
        sizes = [event.believed_blocks_max for event in watcher.told if isinstance(event, LoadReported)]
        assert bool(news) == has_events
        assert sizes == ([] if has_events else [40, 40])
        assert all(value >= 0 for event in news for value in event.hashes)
