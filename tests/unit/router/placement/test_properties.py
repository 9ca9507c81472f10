"""Properties of every placement, after random histories, and of pairs of histories that differ in one thing."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from kvmesh.queue_order import OrderKey, fifo, shortest
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.backlog import Work
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import (
    Candidate,
    Dispatched,
    Finished,
    Hit,
    LoadReported,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaLost,
    ReplicaState,
    Started,
    Stored,
    Wait,
)

BLOCK = 10


def policy_of(
    names: list[str],
    seed: int = 0,
    router: str = "router-0",
    local: int = 0,
    order_key: OrderKey = shortest,
) -> CostPolicy:
    policy = CostPolicy(
        router,
        LocalPrefixIndex(),
        random.Random(seed),
        block_tokens=BLOCK,
        dispatch_ahead_s=1000.0,
        local_prefill_tokens_max=local,
        order_key=order_key,
    )
    for name in names:
        policy.local_index.add(name)
    return policy


def request_of(
    index: int, hashes: tuple[int, ...], *, excluded: frozenset[str] = frozenset(), headroom: int = 0
) -> PlacementRequest:
    tokens = len(hashes) * BLOCK + 5
    return PlacementRequest(
        f"{index:032x}", hashes, tokens, 100, True, excluded, kv_headroom_permille=headroom
    )


def send(policy: CostPolicy, request: PlacementRequest, answer: Placement, now_s: float) -> Dispatched:
    told = Dispatched(
        policy.backlog._own_router,
        request.request_id,
        answer.prefill or answer.decode,
        request.hashes,
        answer.prefill_s,
        now_s,
        now_s + 1e6,
    )
    policy.observe(told)
    return told


def end(policy: CostPolicy, told: Dispatched, now_s: float, seconds: float) -> None:
    policy.observe(Started(told.router, told.request_id, now_s - seconds))
    tokens = len(told.hashes) * BLOCK + 5
    policy.observe(Finished(told.router, told.request_id, now_s, Hit(0, tokens, 0, seconds)))


def fits(one: ReplicaState, blocks: int, headroom_permille: int) -> bool:
    headroom = one.block_total * headroom_permille // 1000
    taken = one.block_own if one.is_stale else one.block_reserved
    return taken == 0 or one.block_total - taken - blocks >= headroom


def remembered(thing: object, name: str, seen: set[int]) -> str:
    """Return the path in `thing` of a dict with the key `name`; empty if there is none."""
    if id(thing) in seen or isinstance(thing, str | int | float | random.Random):
        return ""
    seen.add(id(thing))
    if isinstance(thing, dict):
        parts = [(repr(key), each) for key, each in thing.items()]
        if name in thing:
            return "here"
    elif isinstance(thing, list | tuple | set | deque):
        parts = [("[]", each) for each in thing]
    else:
        slots = (slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ()))
        names = [*getattr(thing, "__dict__", ()), *slots]
        parts = [(each, getattr(thing, each, None)) for each in names]
    found = ((part, remembered(each, name, seen)) for part, each in parts)
    return next((f"{part}.{where}" for part, where in found if where), "")


def test_no_state_remembers_a_lost_replica() -> None:
    """Replica names come and go for years."""
    policy = policy_of(["p0", "p1"])
    policy.prefills._dispatch_ahead_s = 0.0
    view = PoolView([ReplicaState("p0")], [ReplicaState("d0", 400)], 1)
    for index in range(4):
        answer = policy.place(request_of(index, (7, 8)), view, float(index))
        if isinstance(answer, Placement):
            told = send(policy, request_of(index, (7, 8)), answer, float(index))
            policy.observe(Dispatched("router-1", f"{index + 9:032x}", "p0", (7, 8), 0.1, float(index), 1e6))
            if not index:
                end(policy, told, index + 0.5, 0.3)
        policy.observe(LoadReported("p0", 1, 1, float(index)))
    assert len(policy.prefills._held) and remembered(policy, "p0", set())
    policy.local_index.drop("p0")
    policy.observe(ReplicaLost("p0"))
    policy.place(request_of(9, (7, 8)), PoolView([ReplicaState("p1")], view.decode, 0), 9.0)
    assert list(policy.local_index.maintain())
    assert not remembered(policy, "p0", set())


@pytest.mark.parametrize("seed", range(8))
def test_only_those_in_view_with_room_are_chosen(seed: int) -> None:
    """Draining and lost replicas are not in the view. Excluded ones are the last choice. Decode has room for it."""
    rng = random.Random(seed)
    count = rng.choice((2, 5, 40))
    prefills = [ReplicaState(f"p{index}", 10_000) for index in range(count)]
    decodes = [ReplicaState(f"d{index}", 400) for index in range(count)]
    policy = policy_of([one.name for one in (*prefills, *decodes)], seed, local=rng.choice((0, 100)))
    running: list[Dispatched] = []
    now_s = 0.0
    for index in range(150):
        now_s += rng.expovariate(count * 5)
        if running and rng.random() < 0.5:
            end(policy, running.pop(rng.randrange(len(running))), now_s, rng.uniform(0.001, 0.1))
        if rng.random() < 0.02:
            gone = rng.choice(prefills).name
            policy.observe(ReplicaLost(gone))
            running = [one for one in running if one.replica != gone]
        seen = [one for one in prefills if rng.random() < 0.7]
        ready = [one for one in decodes if rng.random() < 0.7]
        for one in ready:
            one.block_reserved = rng.randint(0, 400)
            one.running_requests = rng.randint(0, 20)
        excluded = frozenset(one.name for one in (*seen, *ready) if rng.random() < 0.3)
        start = rng.randrange(20) * 1000
        request = request_of(
            index,
            tuple(range(start, start + rng.randint(1, 30))),
            excluded=excluded,
            headroom=rng.choice((0, 100)),
        )
        answer = policy.place(request, PoolView(seen, ready), now_s)
        needed = -(-(request.token_count + request.output_tokens_max) // BLOCK)
        allowed = [one for one in ready if one.name not in excluded] or ready
        fitting = [one.name for one in allowed if fits(one, needed, request.kv_headroom_permille)]
        if isinstance(answer, Wait):
            assert not fitting, (seed, index, answer)
            continue
        assert answer.decode in fitting, (seed, index)
        names = {one.name for one in seen}
        assert answer.prefill is None or answer.prefill in (names - excluded or names), (seed, index)
        running.append(send(policy, request, answer, now_s))
        policy.assert_consistent()


def scores(
    policy: CostPolicy, request: PlacementRequest, view: PoolView, now_s: float
) -> dict[str, Candidate]:
    answer = policy.place(request, view, now_s)
    assert isinstance(answer, Placement)
    return {one.replica: one for one in answer.candidates}


@pytest.mark.parametrize("seed", range(30))
def test_more_match_and_less_queue_are_never_worse(seed: int) -> None:
    """Two equal histories, one with a longer match or more work at one replica: its score follows."""
    names = [f"p{index}" for index in range(4)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    found = []
    for change in ("none", "match", "queue"):
        rng = random.Random(seed)
        policy = policy_of([*names, "d0"], seed)
        now_s, running = 0.0, []
        for index in range(60):
            now_s += rng.expovariate(10)
            start = rng.randrange(6) * 1000
            request = request_of(index, tuple(range(start, start + rng.randint(1, 200))))
            answer = policy.place(request, view, now_s)
            assert isinstance(answer, Placement)
            running.append(send(policy, request, answer, now_s))
            if len(running) > 8:
                end(policy, running.pop(0), now_s, rng.uniform(0.01, 0.3))
        hashes = tuple(range(9000, 9100))
        some = rng.randint(0, 60)
        policy.observe(Stored("p2", hashes[:some]))
        if change == "match":
            policy.observe(Stored("p2", hashes[some : some + rng.randint(1, 40)]))
        if change == "queue":
            policy.backlog.add(_work(policy, "p2", rng.uniform(0.001, 2.0), now_s))
        found.append(scores(policy, request_of(99, hashes), view, now_s))
    plain, more, longer = found
    assert more["p2"].score <= plain["p2"].score + 1e-9, seed
    assert longer["p2"].score >= plain["p2"].score - 1e-9, seed
    for name in ("p0", "p1", "p3"):
        assert more[name].score == pytest.approx(plain[name].score), seed


def _work(policy: CostPolicy, replica: str, seconds: float, now_s: float) -> Work:
    return Work((policy.backlog._own_router, "f" * 32), replica, (), seconds, now_s, now_s + 1e6)


def test_a_cold_start_spreads() -> None:
    """As many equal prompts as replicas, without history: each replica gets one. Routers differ in their first choice."""
    names = [f"p{index}" for index in range(8)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    for seed in range(10):
        policy = policy_of([*names, "d0"], seed)
        chosen = []
        for index in range(8):
            request = request_of(index, tuple(range(index * 1000, index * 1000 + 50)))
            answer = policy.place(request, view, 0.0)
            assert isinstance(answer, Placement) and answer.prefill is not None
            send(policy, request, answer, 0.0)
            chosen.append(answer.prefill)
        assert Counter(chosen) == dict.fromkeys(names, 1), seed


def test_conversations_stay_where_their_cache_is() -> None:
    """Twenty conversations in random order, half the capacity used: nineteen turns in twenty stay at their replica."""
    rng = random.Random(4)
    names = [f"p{index}" for index in range(4)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    policy = policy_of([*names, "d0"], 4)
    length = dict.fromkeys(range(20), 20)
    home: dict[int, str] = {}
    stayed = turns = 0
    now_s = 0.0
    busy_until_s = dict.fromkeys(names, 0.0)
    for index in range(400):
        now_s += rng.expovariate(40)
        talk = rng.randrange(20)
        length[talk] += rng.randint(1, 10)
        request = request_of(index, tuple(range(talk * 10_000, talk * 10_000 + length[talk])))
        answer = policy.place(request, view, now_s)
        assert isinstance(answer, Placement) and answer.prefill is not None
        told = send(policy, request, answer, now_s)
        end_s = max(now_s, busy_until_s[told.replica]) + answer.prefill_s
        busy_until_s[told.replica] = end_s
        if talk in home:
            turns += 1
            stayed += home[talk] == answer.prefill
        home[talk] = answer.prefill
        end(policy, told, end_s, answer.prefill_s)
    assert stayed / turns >= 0.95, (stayed, turns)


def test_routers_that_hear_each_other_late_take_different_idle_replicas() -> None:
    """Four routers do not know the last 100 ms of each other: of sixteen idle replicas few are taken twice."""
    names = [f"p{index:02}" for index in range(16)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    twice = 0
    for seed in range(10):
        policies = [policy_of([*names, "d0"], 10 * seed + index, f"router-{index}") for index in range(4)]
        for index in range(200):  # dispatches of the others, heard 100 ms late
            for policy in policies:
                other = f"router-{index % 4}"
                if other != policy.backlog._own_router:
                    sent = other, f"{index:032x}", "p00", (), 0.0, index * 0.02, 1e6
                    told = Dispatched(*sent, received_s=index * 0.02 + 0.1)
                    policy.observe(told)
                    policy.observe(Finished(other, f"{index:032x}", index * 0.02))
                policy.place(request_of(7, (1,)), view, index * 0.02 + 0.1)
        taken: Counter[str | None] = Counter()
        for index in range(2):
            for number, policy in enumerate(policies):
                request = request_of(
                    1000 + index * 4 + number,
                    tuple(range(number * 1000 + index * 100, number * 1000 + index * 100 + 90)),
                )
                answer = policy.place(request, view, 4.1)
                assert isinstance(answer, Placement)
                send(policy, request, answer, 4.1)
                taken[answer.prefill] += 1
        twice += sum(count - 1 for count in taken.values())
    assert twice == 0


def test_of_many_replicas_the_deepest_holder_and_a_light_one_are_compared() -> None:
    """Two hundred replicas: an idle pool takes the deepest holder; a busy holder is left for an idle replica."""
    names = [f"p{index}" for index in range(200)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    policy = policy_of([*names, "d0"], 1)
    hashes = tuple(range(100))
    for name in names[:90]:
        policy.observe(Stored(name, hashes[:10]))
    policy.observe(Stored("p150", hashes[:80]))
    answer = policy.place(request_of(1, hashes), view, 0.0)
    assert isinstance(answer, Placement) and (answer.prefill, answer.matched_blocks) == ("p150", 80)
    policy.backlog.add(_work(policy, "p150", 5.0, 0.0))
    policy.observe(Started("router-0", "f" * 32, 0.0))
    answer = policy.place(request_of(2, hashes), view, 0.0)
    assert isinstance(answer, Placement) and answer.prefill != "p150" and answer.matched_blocks in (0, 10)


def test_decode_that_has_streams_does_not_run_prompts_itself() -> None:
    """A short prompt runs on an idle decode replica, and at prefill where many streams would stand still meanwhile."""
    decode = ReplicaState("d0", 10_000)
    view = PoolView([ReplicaState("p0", 10_000)], [decode])
    policy = policy_of(["p0", "d0"], local=1000)
    request = request_of(1, tuple(range(50)))
    answer = policy.place(request, view, 0.0)
    assert isinstance(answer, Placement) and answer.prefill is None
    decode.running_requests = 100
    answer = policy.place(request, view, 0.0)
    assert isinstance(answer, Placement) and answer.prefill == "p0"


def test_a_slow_replica_gets_less() -> None:
    """One of four takes three times as long as the others: after some prompts each, few go there any more."""
    names = [f"p{index}" for index in range(4)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    policy = policy_of([*names, "d0"], 6)
    taken: Counter[str] = Counter()
    for index in range(400):
        now_s = index * 10.0
        request = request_of(index, tuple(range(index * 1000, index * 1000 + 50)))
        answer = policy.place(request, view, now_s)
        assert isinstance(answer, Placement) and answer.prefill is not None
        told = send(policy, request, answer, now_s)
        end(policy, told, now_s + 1.0, 0.3 if answer.prefill == "p1" else 0.1)
        if index >= 200:
            taken[answer.prefill] += 1
    assert taken["p1"] <= 20 and sum(taken.values()) == 200, taken


@pytest.mark.parametrize("order_key", [shortest, fifo])
@pytest.mark.parametrize("is_cached", [False, True])
def test_shortest_first_only_requests_for_a_cache_are_affine(order_key: OrderKey, *, is_cached: bool) -> None:
    """One replica is idle, three are busy. Prompts go to the idle one for its cache, or for its short queue alone.

    With first come, first served the queue elsewhere is a loss. With shortest first a short prompt overtakes most of it.
    """
    names = [f"p{index}" for index in range(4)]
    view = PoolView([ReplicaState(name, 10_000) for name in names], [ReplicaState("d0", 10_000)])
    policy = policy_of([*names, "d0"], 7, order_key=order_key)
    for index, name in enumerate(names[1:]):
        busy = Dispatched("r0", f"{index:x}", name, (), 10.0, 0.0, 1e9)
        policy.observe(busy)
        policy.observe(Started("r0", busy.request_id, 0.0))
    for index in range(20):
        now_s = index * 0.1
        hashes = tuple(range(50)) if is_cached else tuple(range(1000 * index, 1000 * index + 50))
        request = request_of(100 + index, hashes)
        if is_cached:
            policy.local_index.store("p0", hashes)
        answer = policy.place(request, view, now_s)
        assert isinstance(answer, Placement) and answer.prefill == "p0"
        end(policy, send(policy, request, answer, now_s), now_s + 0.05, 0.05)
    has_regulars = policy.prefills._displaced_demand.demands.keys() == {"p0"}
    assert has_regulars is (is_cached or order_key is fifo)
