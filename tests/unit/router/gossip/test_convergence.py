"""Gossip between routers over a wire that loses, repeats and reorders entries; routers and replicas are lost; clocks
differ.

Once the wire loses no more entries, each router's estimate is the truth within a second.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.gossip.exchange import Exchange
from services.router.gossip.messages import Digest, Entry, RepairRequest
from services.router.gossip.peer_routers import DIGEST_INTERVAL_S, SILENT_S, PeerRouters, known_dispatches
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.backlog import Backlog
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import (
    Dispatched,
    Event,
    Finished,
    Hit,
    LoadReported,
    PlacementRequest,
    PoolView,
    ReplicaLost,
    ReplicaState,
    Started,
)

TICK_S = 0.01
LEASE_S = 3.0
LATE_S = 0.3
"""The latest entry arrives within this."""

REPAIRED_S = 2 * DIGEST_INTERVAL_S
"""Time until every router has the true state after the last lost entry: a digest, a repair request, the answer."""


@dataclass
class Prompt:
    router: str
    replica: str
    request_id: str
    hashes: tuple[int, ...]
    at_s: float
    is_started: bool = False


@dataclass
class Router:
    """A router's estimates, and its own clock."""

    world: World
    name: str
    boot_id: str
    offset_s: float
    policy: CostPolicy = field(init=False)
    exchange: Exchange = field(init=False)
    digest_s: float = float("-inf")

    def __post_init__(self) -> None:
        local_index = LocalPrefixIndex()
        self.policy = CostPolicy(
            self.name,
            local_index,
            random.Random(1),
            block_tokens=4,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=0,
        )
        for replica in self.world.replicas:
            local_index.add(replica)
        peer_routers = PeerRouters(
            self.name,
            self.boot_id,
            self.policy.observe,
            known_dispatches(self.policy.backlog),
            lambda replica: replica in self.world.replicas,
        )
        self.exchange = Exchange(self.name, self.boot_id, peer_routers)
        self.exchange.is_reading = True

    @property
    def now_s(self) -> float:
        return self.world.now_s + self.offset_s

    def tell(self, event: Dispatched | Started | Finished) -> None:
        self.policy.observe(event)
        self.exchange.publish(event, self.now_s)

    def tick(self) -> None:
        if self.now_s >= self.digest_s:
            self.digest_s = self.now_s + DIGEST_INTERVAL_S
            self.exchange.schedule_digest()
        self.exchange.peer_routers.detect_failures(self.now_s)
        for _ in zip(range(self.world.rng.randrange(3)), self.policy.local_index.maintain(), strict=False):
            pass  # the rest is done in later calls
        while self.exchange.due_s(self.now_s) <= self.now_s:
            entry = self.exchange.next_entry(self.now_s)
            if entry is None:
                break
            self.world.send(self.exchange.encoded(entry, self.now_s))

    def hear(self, data: bytes) -> None:
        list(self.exchange.applying(data, self.now_s))

    def believed(self) -> set[tuple[str, str, str, bool]]:
        backlog = self.policy.backlog
        return {
            (work.replica, *work.key, work.started_s is not None)
            for replica in self.world.replicas
            for work in backlog.of(replica)
        }


class World:
    """Replicas, and routers that dispatch to them at random."""

    def __init__(self, seed: int, loss: float, routers: int = 3, replicas: int = 3) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now_s = 1000.0
        self.replicas = [f"p{index}" for index in range(replicas)]
        self.prompts: list[Prompt] = []
        self.routers: dict[str, Router] = {}
        self.dead_since: dict[str, float] = {}
        self.wire: list[tuple[float, str, bytes]] = []
        self.boots = 0
        self.lag_s = TICK_S / 2
        """Delay of each entry until it is read, also by its writer."""
        for index in range(routers):
            self.boot(f"r{index}")

    def boot(self, name: str) -> None:
        self.boots += 1
        offset_s = self.rng.uniform(-1e5, 1e5)
        self.dead_since.pop(name, None)
        self.routers[name] = Router(self, name, f"boot-{self.boots}", offset_s)
        self.registered()

    def registered(self) -> None:
        leased = [(one.name, one.boot_id) for one in self.routers.values()]
        for one in self.routers.values():
            one.exchange.set_routers(leased, one.now_s)

    def send(self, data: bytes) -> None:
        for name in self.routers:
            if self.rng.random() < self.loss:
                continue
            delay_s = self.rng.uniform(0.001, 0.02) if self.loss else self.lag_s
            if self.rng.random() < self.loss:  # late, behind others
                delay_s += 0.1
            self.wire.append((self.now_s + delay_s, name, data))
            if self.rng.random() < self.loss:
                self.wire.append((self.now_s + 2 * delay_s, name, data))

    def tick(self) -> None:
        self.now_s += TICK_S
        due = sorted(message for message in self.wire if message[0] <= self.now_s)
        self.wire = [message for message in self.wire if message[0] > self.now_s]
        for _, name, data in due:
            if name in self.routers:
                self.routers[name].hear(data)
        for one in self.routers.values():
            one.tick()
        for name, since_s in list(self.dead_since.items()):
            if self.now_s - since_s > LEASE_S:
                del self.dead_since[name]
                self.registered()

    def dispatch(self) -> None:
        router = self.rng.choice(list(self.routers.values()))
        start = self.rng.randrange(50)
        prompt = Prompt(
            router.name,
            self.rng.choice(self.replicas),
            f"{self.rng.getrandbits(128):032x}",
            tuple(range(start, start + 8)),
            self.now_s,
        )
        self.prompts.append(prompt)
        router.tell(
            Dispatched(
                prompt.router,
                prompt.request_id,
                prompt.replica,
                prompt.hashes,
                self.rng.uniform(0.1, 1.0),
                router.now_s,
                router.now_s + 60,
            )
        )

    def start(self) -> None:
        waiting = [one for one in self.prompts if not one.is_started]
        if waiting:
            prompt = self.rng.choice(waiting)
            prompt.is_started = True
            router = self.routers[prompt.router]
            router.tell(Started(prompt.router, prompt.request_id, router.now_s))

    def finish(self) -> None:
        if self.prompts:
            self.end(self.rng.choice(self.prompts), Hit(0, 8, self.rng.randrange(9), 0.1))

    def end(self, prompt: Prompt, hit: Hit | None = None) -> None:
        self.prompts.remove(prompt)
        router = self.routers[prompt.router]
        router.tell(Finished(prompt.router, prompt.request_id, router.now_s, hit))

    def again(self) -> None:
        """A replica returned a prompt: the same request goes to another one."""
        if self.prompts:
            prompt = self.rng.choice(self.prompts)
            self.end(prompt)
            prompt.replica, prompt.is_started = self.rng.choice(self.replicas), False
            prompt.at_s = self.now_s
            self.prompts.append(prompt)
            router = self.routers[prompt.router]
            router.tell(
                Dispatched(
                    *(prompt.router, prompt.request_id, prompt.replica, prompt.hashes),
                    *(0.5, router.now_s, router.now_s + 60),
                )
            )

    def kill_router(self) -> None:
        """Lose a router. Its streams break, and the replicas forget its prompts."""
        if len(self.routers) > 1:
            name = self.rng.choice(list(self.routers))
            del self.routers[name]
            self.prompts = [one for one in self.prompts if one.router != name]
            self.dead_since[name] = self.now_s

    def restart_replica(self) -> None:
        """Restart a replica. Each router notices that its stream broke."""
        name = self.rng.choice(self.replicas)
        for prompt in [one for one in self.prompts if one.replica == name]:
            self.end(prompt)
        for router in self.routers.values():
            router.policy.observe(ReplicaLost(name))

    def truth(self) -> set[tuple[str, str, str, bool]]:
        return {(one.replica, one.router, one.request_id, one.is_started) for one in self.prompts}

    def run(self, ticks: int) -> None:
        actions = [self.dispatch] * 8 + [self.start] * 5 + [self.finish] * 7 + [self.again]
        for _ in range(ticks):
            for _ in range(self.rng.randrange(3)):
                self.rng.choice(actions)()
            chance = self.rng.random()
            if chance < 0.004:
                self.kill_router()
            elif chance < 0.012 and self.dead_since:
                self.boot(self.rng.choice(list(self.dead_since)))
            elif chance < 0.016:
                self.restart_replica()
            self.tick()

    def rest(self, seconds: float) -> None:
        """Let time pass without losses and new events."""
        self.loss = 0.0
        for _ in range(round(seconds / TICK_S)):
            self.tick()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from((0.05, 0.15, 0.3)), st.integers(2, 4))
def test_estimates_converge_within_a_second_of_the_last_loss(seed: int, loss: float, routers: int) -> None:
    """Each live router knows the place of every prompt and whether it runs, and nothing of lost routers."""
    world = World(seed, loss, routers)
    world.run(300)
    world.rest(SILENT_S + LATE_S if world.dead_since else REPAIRED_S + LATE_S)
    truth = world.truth()
    for router in world.routers.values():
        assert router.believed() == truth, (router.name, router.believed() ^ truth)
        router.policy.assert_consistent()
    for prompt in list(world.prompts):
        world.end(prompt)
    world.rest(0.1)
    for router in world.routers.values():
        assert len(router.policy.backlog) == 0
        list(router.policy.local_index.maintain())
        assert router.policy.local_index.in_flight_block_count == 0


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_without_losses_nothing_is_requested_or_repaired(seed: int) -> None:
    """Entries in order need no repair requests; digests confirm them."""
    world = World(seed, 0.0)
    world.rest(0.1)
    for _ in range(200):
        world.rng.choice((world.dispatch, world.dispatch, world.start, world.finish, world.again))()
        world.tick()
    world.rest(0.1)
    for router in world.routers.values():
        assert router.exchange.peer_routers.repaired_total == router.exchange.peer_routers.gap_total == 0
        assert router.believed() == world.truth()


def test_a_new_router_learns_the_dispatches_of_its_peers() -> None:
    """A starting router asks, and a router that was alone until then answers. Ages survive clocks that differ by a day."""
    world = World(3, 0.0, routers=1)
    alone = world.routers["r0"]
    for _ in range(5):
        world.dispatch()
    world.start()
    world.rest(2.0)
    world.boot("r1")
    new = world.routers["r1"]
    assert not new.exchange.peer_routers.is_caught_up(new.now_s)
    world.rest(0.1)
    assert new.exchange.peer_routers.is_caught_up(new.now_s)
    assert new.believed() == world.truth()
    for replica in world.replicas:
        here_s = new.policy.queue_s(replica, new.now_s)
        assert abs(here_s - alone.policy.queue_s(replica, alone.now_s)) < 0.05
    world.boot("r1")
    world.rest(0.1)
    assert world.routers["r1"].believed() == world.truth()


def test_repeated_repair_requests_do_not_restart_the_full_answer() -> None:
    """The full answer takes longer than a starting router waits. Further requests for everything do not restart it."""
    peer_routers = PeerRouters("r0", "boot-0", lambda _: None, lambda _: {}, lambda _: True)
    exchange = Exchange("r0", "boot-0", peer_routers)
    exchange.set_routers([("r0", "boot-0"), ("r1", "boot-1")], 0.0)
    hashes = tuple(range(1000))
    for number in range(1000):
        exchange.open.record(Dispatched("r0", f"{number:032x}", "p0", hashes, 0.1, 0.0, 60.0))
    told: list[str] = []
    for turn in range(200):
        repair_requests = [RepairRequest("r0", "boot-0"), RepairRequest("r0", "boot-0", (f"{999:032x}",))]
        list(peer_routers.applying(Entry("r1", "boot-1", turn + 1, repair_requests), 0.0))
        entry = exchange.next_entry(0.0)
        assert entry is not None
        told += [message.request_id for message in entry.messages if isinstance(message, Dispatched)]
        if any(isinstance(message, Digest) and message.is_full for message in entry.messages):
            break
    else:
        raise AssertionError(f"{len(told)} were told, and no end of it")
    assert sorted(told) == sorted(exchange.open.request_ids()), "some are told twice, or not"


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_the_propagation_delay_counts_in_the_age_of_a_dispatch(seed: int, lag_s: float) -> None:
    """Every router knows the time of a dispatch and its propagation delay, for any difference of clocks."""
    world = World(seed, 0.0)
    world.lag_s = lag_s
    world.rest(10 * DIGEST_INTERVAL_S)
    for _ in range(100):
        world.rng.choice((world.dispatch, world.dispatch, world.start, world.finish, world.again))()
        world.tick()
        for router in world.routers.values():
            router.policy.prefills._collision_risk.update(
                [ReplicaState(name) for name in world.replicas], 1, router.now_s
            )
    world.rest(1.0)
    real_s = {one.request_id: one.at_s for one in world.prompts}
    for router in world.routers.values():
        assert router.believed() == world.truth()
        for replica in world.replicas:
            for work in router.policy.backlog.of(replica):
                assert abs(work.at_s - router.offset_s - real_s[work.key[1]]) < 1.5 * TICK_S
        lags_s = router.policy.prefills._collision_risk._lags
        assert lags_s and 0.0 <= min(lags_s) - lag_s < 2.5 * TICK_S, "until it is written, and read"


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_repeated_dispatches_change_nothing_where_they_are_known(seed: int) -> None:
    """A full answer for a starting router changes no start or dispatch at the other routers."""
    world = World(seed, 0.0)
    world.rest(0.1)
    for _ in range(60):
        world.rng.choice((world.dispatch, world.dispatch, world.start, world.finish))()
        world.tick()
    world.rest(0.1)
    later_s = {name: router.now_s + 1.0 for name, router in world.routers.items()}

    def known(router: Router) -> object:
        backlog = router.policy.backlog
        works = [work for replica in world.replicas for work in backlog.of(replica)]
        return (
            [(work.key, work.started_s, work.begun_s) for work in works],
            [backlog.recent_s(replica, later_s[router.name]) for replica in world.replicas],
        )

    before = {name: known(router) for name, router in world.routers.items()}
    world.boot("r9")
    world.rest(0.1)
    assert world.routers["r9"].believed() == world.truth()
    assert {name: known(world.routers[name]) for name in before} == before


def test_a_new_router_learns_prefill_costs() -> None:
    """A starting router gets the latest measurements. Before its first dispatch its estimates are those of its peers."""
    world = World(5, 0.0, routers=2)
    old = world.routers["r0"]
    for index in range(40):
        world.dispatch()
        tokens = 100 * (1 + index % 7)
        world.end(world.prompts[0], Hit(0, tokens, 0, 0.05 + 0.002 * tokens))
        world.tick()
    world.rest(0.1)
    expected_s = old.policy.costs.estimate_s(1000, 1000)
    assert abs(expected_s - 2.05) < 0.2
    assert abs(world.routers["r1"].policy.costs.estimate_s(1000, 1000) - expected_s) < 0.1
    measured = world.routers["r1"].policy.costs.observation_total
    world.boot("r2")
    world.rest(0.1)
    new = world.routers["r2"]
    assert world.routers["r1"].policy.costs.observation_total == measured, "it knew them"
    assert new.policy.knows_costs()
    assert abs(new.policy.costs.estimate_s(1000, 1000) - expected_s) < 0.1
    measured = new.policy.costs.observation_total
    world.rest(1.0)
    assert new.policy.costs.observation_total == measured


def test_a_router_that_falls_silent_is_forgotten_and_comes_back() -> None:
    """The lease of a silent router still stands. Its dispatches stop counting after a moment, and return with its next
    entry."""
    world = World(4, 0.0, routers=2)
    for _ in range(6):
        world.dispatch()
    world.rest(0.2)
    one, two = world.routers["r0"], world.routers["r1"]
    own = {work for work in world.truth() if work[1] == "r0"}
    assert one.believed() == world.truth() and own not in (set(), world.truth())
    world.loss = 1.0
    for _ in range(round((SILENT_S + DIGEST_INTERVAL_S) / TICK_S)):
        world.tick()
    assert one.believed() == own and one.exchange.peer_routers.silent_count == 1
    world.rest(REPAIRED_S)
    assert one.believed() == two.believed() == world.truth()


REPLICA = "p0"


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from((0.05, 0.3, 1.0)))
def test_load_reports_alone_bound_the_believed_dispatches_of_peers(seed: int, loss: float) -> None:
    """Redis is unavailable for good. After two reports no more prompts are believed at a replica than are there."""
    rng = random.Random(seed)
    backlog, policy = _policy()
    there: dict[str, bool] = {}
    own: dict[str, bool] = {}
    now_s = 100.0
    for _ in range(300):
        now_s += rng.expovariate(20)
        kind = rng.randrange(4)
        mine = rng.random() < 0.4
        prompts, router = (own, "r0") if mine else (there, "r1")
        event: Event | None = None
        if kind == 0:
            name = f"{rng.getrandbits(128):032x}"
            prompts[name] = False
            event = Dispatched(router, name, REPLICA, (rng.randrange(9),), 0.2, now_s, now_s + 60)
        elif prompts:
            name = rng.choice(list(prompts))
            if kind == 1 and not prompts[name]:
                prompts[name] = True
                event = Started(router, name, now_s)
            elif kind > 1:
                del prompts[name]
                event = Finished(router, name, now_s)
        if event is not None and (mine or rng.random() >= loss):
            policy.observe(event)
    for _ in range(4):
        now_s += 0.5
        running = sum(there.values()) + sum(own.values())
        policy.observe(LoadReported(REPLICA, len(there) + len(own) - running, running, now_s))
    policy.place(PlacementRequest("f" * 32, (), 4, 4), PoolView([], []), now_s)
    works = backlog.of(REPLICA)
    assert {work.key[1]: work.started_s is not None for work in works if work.is_own} == own
    others = [work for work in works if not work.is_own]
    assert len(others) <= len(there)
    assert sum(work.started_s is not None for work in others) <= sum(there.values())
    assert sum(work.started_s is None for work in others) <= len(there) - sum(there.values())
    policy.observe(LoadReported(REPLICA, 0, 0, now_s + 1.0))
    policy.observe(LoadReported(REPLICA, 0, 0, now_s + 2.0))
    assert all(work.is_own for work in backlog.of(REPLICA))
    policy.assert_consistent()


def _policy() -> tuple[Backlog, CostPolicy]:
    policy = CostPolicy(
        "r0",
        LocalPrefixIndex(),
        random.Random(0),
        block_tokens=4,
        dispatch_ahead_s=1.0,
        local_prefill_tokens_max=0,
    )
    policy.local_index.add(REPLICA)
    return policy.backlog, policy


def test_a_fresh_dispatch_is_not_refuted_by_an_early_report() -> None:
    """The replica had not received the prompt at its report. A prompt that it has finished is forgotten later, with its
    hit."""
    backlog, policy = _policy()
    name = "a" * 32
    policy.observe(Dispatched("r1", name, REPLICA, (1, 2), 0.5, 10.0, 70.0))
    policy.observe(LoadReported(REPLICA, 0, 0, 10.1))
    policy.observe(LoadReported(REPLICA, 0, 0, 10.2))
    assert len(backlog.of(REPLICA)) == 1
    policy.observe(LoadReported(REPLICA, 0, 0, 11.0))
    policy.observe(Finished("r1", name, 11.01, Hit(8, 0, 2, 0.0)))
    assert policy.local_index.blocks_of(REPLICA) == 2
    assert len(backlog) == 0
