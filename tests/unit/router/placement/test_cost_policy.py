"""The cost policy: fastest start on an idle pool, cache affinity in a backlog, own and foreign dispatches counted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvmesh.queue_order import AGING
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import RECHECK_S, CostPolicy
from services.router.placement.decode_choice import HANDOFF_S, DecodeChoice
from services.router.placement.policy import (
    Dispatched,
    Finished,
    Hit,
    LoadReported,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaLost,
    ReplicaState,
    RouterLost,
    Started,
    Stored,
    Wait,
)
from services.router.placement.precedence import DEFAULT_PRECEDENCE
from services.router.placement.shortlist import Match
from tests.unit.overtaking import overtaken_s

BLOCK = 10


def policy_of(
    prefills: int = 3, decodes: int = 2, local: int = 0, ahead_s: float = 100.0, seed: int = 0
) -> CostPolicy:
    policy = CostPolicy(
        "router-0",
        LocalPrefixIndex(),
        random.Random(seed),
        block_tokens=BLOCK,
        dispatch_ahead_s=ahead_s,
        local_prefill_tokens_max=local,
    )
    for index in range(prefills):
        policy.local_index.add(f"p{index}")
    for index in range(decodes):
        policy.local_index.add(f"d{index}")
    return policy


def view_of(prefills: int = 3, decodes: int = 2, waiting: int = 0) -> PoolView:
    return PoolView(
        [ReplicaState(f"p{index}", 1000) for index in range(prefills)],
        [ReplicaState(f"d{index}", 1000) for index in range(decodes)],
        waiting,
    )


def request(name: int = 0, tokens: int = 1000, start: int = 0, **fields: object) -> PlacementRequest:
    hashes = tuple(range(start, start + tokens // BLOCK))
    return PlacementRequest(f"{name:032x}", hashes, tokens, 100, **fields)  # type: ignore[arg-type]


def dispatched(
    name: int, replica: str, prefill_s: float, hashes: tuple[int, ...] = (), router: str = "router-0"
) -> Dispatched:
    return Dispatched(router, f"{name:032x}", replica, hashes, prefill_s, 0.0, 1000.0)


def placed(answer: Placement | Wait) -> Placement:
    assert isinstance(answer, Placement), answer
    return answer


def test_an_idle_pool_takes_the_longest_match() -> None:
    """Without queues the replica with the deepest prefix starts soonest, and the match is reported."""
    policy = policy_of()
    policy.observe(Stored("p1", tuple(range(40))))
    policy.observe(Stored("p2", tuple(range(70))))
    answer = placed(policy.place(request(explain=True), view_of(), 0.0))
    assert (answer.prefill, answer.matched_blocks) == ("p2", 70)
    assert [one.replica for one in answer.candidates][:2] == ["p2", "p1"]
    assert answer.estimate_s == pytest.approx(policy.costs.estimate_s(300, 1000))


def test_equal_replicas_share_at_random() -> None:
    """Ties are broken evenly, for prefill and decode."""
    policy = policy_of(seed=3)
    answers = [placed(policy.place(request(n, start=n * 1000), view_of(), 0.0)) for n in range(600)]
    for counts, expected in (
        (Counter(a.prefill for a in answers), 200),
        (Counter(a.decode for a in answers), 300),
    ):
        assert all(abs(count - expected) < 70 for count in counts.values()), counts


def test_a_short_queue_is_left_and_in_a_backlog_affinity_holds() -> None:
    """Congestion weight: on an idle pool the holder's queue sends a request elsewhere; in a general backlog it stays."""
    policy = policy_of()
    policy.observe(Stored("p0", tuple(range(90))))
    cold_s = policy.costs.estimate_s(1000, 1000)
    policy.observe(dispatched(1, "p0", 2 * cold_s))
    policy.observe(Started("router-0", f"{1:032x}", 0.0))
    assert placed(policy.place(request(), view_of(), 0.0)).prefill in ("p1", "p2")
    for name in range(2, 8):
        policy.observe(dispatched(name, f"p{name % 3}", 12 * cold_s))
    policy.prefills.typical_s = cold_s
    assert placed(policy.place(request(), view_of(), 0.0)).prefill == "p0"


def test_dispatched_blocks_count_as_in_flight() -> None:
    """In-flight blocks: a second request with the same prefix goes to the replica of the first, if this saves time."""
    policy = policy_of()
    policy.observe(dispatched(1, "p1", 0.001, tuple(range(100))))
    answer = placed(policy.place(request(2), view_of(), 0.0))
    assert (answer.prefill, answer.matched_blocks) == ("p1", 100)
    policy.observe(Finished("router-0", f"{1:032x}", 1.0))
    assert policy.local_index.matched(range(100)) == {}


def test_release_stops_at_the_dispatch_ahead_or_one_request() -> None:
    """Each prefill replica gets one request however long, then more only within the bound; a start makes room."""
    policy = policy_of(prefills=1, ahead_s=0.05)
    first = placed(policy.place(request(1, 100_000), view_of(1), 0.0))
    assert first.prefill_s > 0.05
    policy.observe(dispatched(1, "p0", first.prefill_s))
    answer = policy.place(request(2), view_of(1), 0.0)
    assert isinstance(answer, Wait) and answer.replica == "p0" and answer.until_s == RECHECK_S
    policy.observe(Started("router-0", f"{1:032x}", 0.0))
    assert placed(policy.place(request(2), view_of(1), 0.0)).prefill == "p0"


@pytest.mark.parametrize("seed", range(20))
def test_a_request_that_waited_long_goes_where_it_does_not_fit(seed: int) -> None:
    """A second of waiting takes AGING off its length. The waiting work at the replica still has to be within the bound."""
    rng, policy = random.Random(seed), policy_of(prefills=1, ahead_s=1.0)
    waiting_s = 0.0
    for name in range(rng.randint(1, 6)):
        policy.observe(dispatched(name, "p0", seconds := rng.uniform(0.01, 0.6)))
        waiting_s += seconds
    asked = request(9, rng.randint(1, 50) * 1000)
    prefill_s = policy.costs.estimate_s(asked.token_count, asked.token_count)
    went = []
    for waited_s in sorted(rng.uniform(0.0, prefill_s / AGING + 5.0) for _ in range(40)):
        answer = policy.place(replace(asked, waited_s=waited_s), view_of(1, waiting=3), 0.0)
        went.append(isinstance(answer, Placement))
        assert went[-1] == (waiting_s + max(0.0, prefill_s - AGING * waited_s) <= 1.0), waited_s
    assert went == sorted(went), "it may go, and later it may not"
    last = policy.place(replace(asked, waited_s=overtaken_s(prefill_s)), view_of(1, waiting=3), 0.0)
    assert isinstance(last, Placement) == (waiting_s <= 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_a_silent_replica_is_not_preferred(seed: int) -> None:
    """The last report of a silent replica is too old to refuse by, but the replica is not taken for empty."""
    rng = random.Random(seed)
    policy, view = policy_of(4, 4, seed=seed), view_of(4, 4)
    for decode in view.decode:
        decode.block_total, decode.block_reserved, decode.block_own = 10_000, 8000, rng.randint(0, 4000)
    for prefill in view.prefill:
        prefill.queued_requests = 5
    silent, crowded = rng.choice(view.decode), rng.choice(view.prefill)
    silent.is_stale = crowded.is_stale = True
    crowded.queued_requests = 20
    assert not silent.has_ample_room()
    counts: Counter[str] = Counter()
    for name in range(120):
        answer = placed(policy.place(request(name, 100, name * 1000), view, 0.0))
        assert answer.prefill != crowded.name
        chosen = next(one for one in view.decode if one.name == answer.decode)
        chosen.block_reserved += 10
        chosen.block_own += 10
        counts[chosen.name] += 1
    assert all(28 <= counts[one.name] <= 32 for one in view.decode), counts


def test_only_replicas_that_can_run_a_prompt_count_in_its_estimate() -> None:
    """Decode has the last reply too, but does not run long prompts. A draining replica does not count."""
    policy, view = policy_of(2, 1, local=100), view_of(2, 1)
    for name, depth in (("d0", 90), ("p1", 50), ("p0", 20)):
        policy.local_index.store(name, tuple(range(depth)))
    whole, some = tuple(range(100)), tuple(range(99))
    assert policy.expected(whole, 1005, view.prefill)[0] == 505
    assert policy.expected(some[:95], 955, view.prefill)[0] == 55, "decode runs it"
    assert policy.expected(whole, 1005, view.prefill[:1])[0] == 805
    assert policy.expected(whole, 1005, [])[0] == 105, "there is only decode"
    assert policy.expected((5000,), 15, view.prefill)[0] == 15
    policy._local_tokens_max = 0
    assert policy.expected(some[:90], 900, view.prefill)[0] == 400, "decode holds it whole, and runs nothing"
    policy._local_tokens_max = 100
    answer = placed(policy.place(request(tokens=1000), view, 0.0))
    uncached, seconds = policy.expected(whole, 1000, view.prefill)
    assert (answer.decode, answer.prefill) == ("d0", None) and uncached == 100
    assert answer.prefill_s == pytest.approx(seconds)


def test_decode_that_is_short_enough_runs_a_prompt_though_a_longer_one_there_were_cheaper() -> None:
    """One decode replica has fewer uncached tokens, behind a running prompt. The idle one has too many."""
    policy, view = policy_of(1, 2, local=512), view_of(1, 2)
    hashes = tuple(range(18))
    policy.local_index.store("d0", hashes)
    policy.observe(dispatched(1, "d0", 0.06))
    policy.observe(Started("router-0", f"{1:032x}", 0.0))
    for name in range(2, 12):
        policy.observe(dispatched(name, "p0", 1.0))
        policy.observe(Started("router-0", f"{name:032x}", 0.0))
    asked = PlacementRequest("f" * 32, hashes, 600, 50)
    assert (answer := placed(policy.place(asked, view, 0.0))).prefill is None and answer.decode == "d0", (
        answer
    )


def test_decode_goes_where_most_is_free_counting_what_it_holds() -> None:
    """Reserved blocks decide; held prefix blocks count as free; a refusing replica is left out; full pools wait."""
    policy = policy_of()
    view = view_of()
    view.decode[0].block_reserved = 500
    assert placed(policy.place(request(), view, 0.0)).decode == "d1"
    policy.observe(Stored("d0", tuple(range(100))))
    view.decode[0].block_reserved = 50
    assert placed(policy.place(request(), view, 0.0)).decode == "d0"
    assert placed(policy.place(request(excluded=frozenset(("d0",))), view, 0.0)).decode == "d1"
    view.decode[0].block_reserved = view.decode[1].block_reserved = 950
    assert isinstance(policy.place(request(), view, 0.0), Wait)
    assert isinstance(policy.place(request(), PoolView(view.prefill, []), 0.0), Wait)


def test_blocks_that_decode_holds_need_not_move() -> None:
    """For a prefill elsewhere the cost of decode is the handoff, the blocks that it lacks, and its occupancy."""
    local_index = LocalPrefixIndex()
    local_index.add("holder")
    local_index.store("holder", (1, 2, 3))
    choice = DecodeChoice(BLOCK, 0.5, random.Random(1))
    pool = [ReplicaState("holder", 1000, block_reserved=300), ReplicaState("empty", 1000)]
    request = PlacementRequest("r", (1, 2, 3, 4), 4 * BLOCK + 1, BLOCK)
    fitting = choice.fitting(request, PoolView((), pool), Match(local_index, request.hashes))
    best, cost_s = choice.for_handoff(fitting)
    assert best.name == "holder" and cost_s == pytest.approx(HANDOFF_S + 2 * 0.5 + 0.304)


def test_short_uncached_prompts_run_on_decode_where_that_is_no_later() -> None:
    """Up to the limit of uncached tokens at the best decode replica; beyond it only without any prefill replica."""
    policy = policy_of(local=64)
    assert placed(policy.place(request(tokens=60), view_of(), 0.0)).prefill is None
    assert placed(policy.place(request(tokens=70), view_of(), 0.0)).prefill is not None
    assert placed(policy.place(request(tokens=5000), view_of(0), 0.0)).prefill is None
    policy.observe(Stored("d1", tuple(range(97))))
    answer = placed(policy.place(request(), view_of(), 0.0))
    assert (answer.prefill, answer.decode, answer.matched_blocks) == (None, "d1", 97)


def test_a_first_token_teaches_cost_and_index() -> None:
    """The actual hit sets index bits, the measured time moves the estimates, and the error is reported."""
    policy = policy_of()
    policy.observe(dispatched(1, "p0", 0.06, tuple(range(100))))
    policy.observe(Finished("router-0", f"{1:032x}", 1.0, Hit(400, 600, 40, 0.6)))
    assert policy.local_index.matched(range(100)) == {"p0": 100}
    assert policy.local_index.repaired_block_total == 40
    assert policy.estimate_total_s == 0.06 and policy.measured_total_s == 0.6
    assert policy.costs.estimate_s(600, 1000) == pytest.approx(0.6, rel=0.1)


def test_lost_replicas_and_routers_leave_no_work() -> None:
    """Lost replicas, lost routers, refuted and expired work leave no queue and no in-flight blocks."""
    policy = policy_of()
    for name, router in enumerate(("router-0", "router-1", "router-2", "router-3")):
        policy.observe(dispatched(name, "p0", 1.0, (1, 2), router))
    assert policy.queue_s("p0", 0.0) == 4.0
    policy.observe(RouterLost("router-1"))
    assert policy.queue_s("p0", 0.0) == 3.0
    policy.observe(LoadReported("p0", 0, 0, 2.0))
    policy.observe(LoadReported("p0", 0, 0, 3.0))
    assert policy.queue_s("p0", 3.0) == 1.0, "own work is never denied"
    policy.observe(Finished("router-9", f"{0:032x}", 2.0))
    assert policy.queue_s("p0", 2.0) == 1.0
    policy.observe(dispatched(7, "p1", 1.0, (5,), "router-4"))
    policy.place(request(), view_of(), 1001.0)
    assert policy.queue_s("p0", 1001.0) == policy.queue_s("p1", 1001.0) == 0
    policy.observe(dispatched(8, "p2", 1.0, (6,)))
    policy.observe(ReplicaLost("p2"))
    assert len(policy.backlog) == 0
    list(policy.local_index.maintain())
    assert policy.local_index.in_flight_block_count == 0
    policy.assert_consistent()


def test_running_work_shrinks_and_long_waiting_work_is_not_overtaken() -> None:
    """Q counts the rest of the running prompt, and the waiting prompts that are served first: shortest first with aging."""
    policy = policy_of()
    policy.observe(dispatched(1, "p0", 1.0))
    policy.observe(Started("router-0", f"{1:032x}", 0.0))
    policy.observe(dispatched(2, "p0", 4.0))
    assert policy.backlog.queue_s("p0", 0.5, 0.25) == 0.75
    assert policy.backlog.queue_s("p0", 5.0, 0.25) == 4.75
    assert policy.backlog.queue_s("p0", 0.5, 12.0) == 4.0
    assert policy.backlog.queue_state("p0", 0.5, 12.0, DEFAULT_PRECEDENCE)[3:] == (1, 4.0)
