"""Small cases of every rival policy's rule."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.router.placement.policy import (
    Dispatched,
    Finished,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    PoolView,
    ReplicaLost,
    ReplicaState,
    Started,
    Stored,
)
from simulator.catalogue import POLICIES
from simulator.cost import Cost
from simulator.rivals.base import PolicySetup, Rival
from simulator.simulation import StartedWithHit

NAMES = ["a", "b", "c"]
BLOCK = 512
FLAT = Cost("flat", 0.0, 1e-3, 0.0)
PROMPT = list(range(100, 110))
"""Ten blocks."""


class Scene:
    """A policy and the events it received."""

    def __init__(self, policy: str, names: Sequence[str] = NAMES, capacity: float = 1000) -> None:
        setup = PolicySetup(list(names), capacity, BLOCK, FLAT, random.Random(1))
        self.policy: PlacementPolicy = POLICIES[policy](setup)
        self.view = PoolView([ReplicaState(name) for name in names], [ReplicaState("decode")])
        self.now_s = 0.0
        self._count = 0

    def ask(self, hashes: Sequence[int] = PROMPT) -> Placement:
        """Return the replica chosen for a prompt."""
        self._count += 1
        request = PlacementRequest(f"{self._count}", hashes, len(hashes) * BLOCK, 1)
        answer = self.policy.place(request, self.view, self.now_s)
        assert isinstance(answer, Placement)
        return answer

    def where(self, hashes: Sequence[int] = PROMPT, tries: int = 20) -> set[str | None]:
        """Return the replicas that may be chosen."""
        return {self.ask(hashes).prefill for _ in range(tries)}

    def store(self, name: str, hashes: Sequence[int]) -> None:
        """Add `hashes` to the cache of `name`."""
        self.policy.observe(Stored(name, hashes))

    def send(self, name: str, hashes: Sequence[int], *, starts: bool = False) -> str:
        """Dispatch a prompt to `name`, without asking the policy; return its id."""
        self._count += 1
        request_id = f"{self._count}"
        seconds = len(hashes) * BLOCK * FLAT.a_s
        event = Dispatched("router-0", request_id, name, hashes, seconds, self.now_s, self.now_s + 1e9)
        self.policy.observe(event)
        if starts:
            self.policy.observe(StartedWithHit("router-0", request_id, self.now_s))
        return request_id


def fresh(count: int, first: int = 10_000) -> list[int]:
    """Return blocks that no cache has."""
    return list(range(first, first + count))


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"round-robin", "hash", "hash-bounded"}))
def test_equals_are_all_chosen(policy: str) -> None:
    """Replicas of equal score are all chosen, whatever their names."""
    assert Scene(policy).where(tries=60) == set(NAMES)


def test_round_robin_takes_turns() -> None:
    """Round robin chooses each replica equally often."""
    scene = Scene("round-robin")
    turns = [scene.ask().prefill for _ in range(6)]
    assert turns[:3] == turns[3:] and set(turns) == set(NAMES)


def test_least_outstanding_counts_requests() -> None:
    """Least outstanding counts unfinished requests, long and short ones alike."""
    scene = Scene("least-outstanding")
    long = scene.send("a", fresh(200))
    scene.send("b", fresh(1))
    assert scene.where() == {"c"}
    scene.send("c", fresh(1))
    scene.send("c", fresh(1))
    assert scene.where() == {"a", "b"}
    scene.policy.observe(Finished("router-0", long, 1.0))
    assert scene.where() == {"a"}


def test_power_of_two_never_takes_the_worst() -> None:
    """Power of two choices never takes the most loaded replica.

    One of any two replicas is less loaded.
    """
    scene = Scene("power-of-two")
    scene.send("b", fresh(1))
    assert scene.where(tries=60) == {"a", "c"}


def test_hash_follows_the_second_block() -> None:
    """Prompts with equal first two blocks go to the same replica, whatever its load.

    The first block alone decides nothing.
    """
    scene = Scene("hash")
    (home,) = scene.where()
    assert scene.where([*PROMPT[:2], *fresh(5)]) == {home}
    rng = random.Random(2)
    seen = {scene.ask([PROMPT[0], rng.getrandbits(64)]).prefill for _ in range(30)}
    assert seen == set(NAMES)
    for _ in range(50):
        scene.send(str(home), fresh(1))
    assert scene.where() == {home}


def test_bounded_hash_goes_on_past_a_full_replica() -> None:
    """Bounded-load consistent hashing skips a replica above 1.25 times the mean load."""
    scene = Scene("hash-bounded")
    (home,) = scene.where()
    scene.send(str(home), fresh(1))
    assert home not in scene.where()  # 2 of 2 requests; ceil(1.25 * 2 / 3) = 1 is allowed
    for name in NAMES:
        scene.send(name, fresh(1))
    scene.send(next(name for name in NAMES if name != home), fresh(1))
    assert scene.where() == {home}  # 3 of 6 requests; ceil(1.25 * 6 / 3) = 3 is allowed


def test_dynamo_adds_blocks_to_compute_and_blocks_held() -> None:
    """Dynamo adds the blocks to compute and the blocks held.

    8 of 10 blocks cached save 8. A running prompt costs its uncached blocks and all its blocks.
    """
    scene = Scene("dynamo")
    scene.store("a", PROMPT[:8])
    assert scene.where() == {"a"}
    scene.send("a", fresh(3))  # 3 to compute + 3 held = 6 < 8
    assert scene.where() == {"a"}
    scene.send("a", fresh(2))  # 10 > 8
    assert scene.where() == {"b", "c"}


def test_llm_d_weighs_prefix_queue_and_memory() -> None:
    """llm-d's weighted prefix score exceeds the longest queue's, but not that of queue and memory.

    8 of 10 blocks cached score 2 * 8/10, the longest queue 1.
    """
    scene = Scene("llm-d", capacity=20)
    scene.store("a", PROMPT[:8])
    scene.send("a", fresh(1), starts=True)
    scene.send("a", fresh(1))
    assert scene.where() == {"a"}  # 1.6 + 0 + 0.9 against 0 + 1 + 1
    scene.send("a", fresh(14))
    assert scene.where() == {"b", "c"}  # 1.6 + 0 + 0.2 against 2


def test_sglang_follows_its_own_tree_until_loads_are_uneven() -> None:
    """SGLang chooses a match above 0.3, else the smallest tree, until loads are uneven.

    Loads are uneven beyond a difference of 64 and 1.5 times the least loaded.
    """
    scene = Scene("sglang")
    scene.send("a", PROMPT[:4])
    scene.send("b", fresh(30, 20_000))
    assert scene.where() == {"a"}  # 4 of 10
    assert scene.where([*PROMPT[:3], *fresh(7)]) == {"c"}  # 3 of 10 is not above 0.3
    for _ in range(64):
        scene.send("a", PROMPT[:4])
    assert scene.where() == {"c"}


def test_smg_follows_events_until_loads_are_uneven() -> None:
    """smg chooses the deepest match, then the least loaded, then the smallest cache.

    Loads are uneven beyond a difference of 32 and 1.1 times the least loaded.
    """
    scene = Scene("smg")
    scene.store("a", PROMPT[:1])
    assert scene.where() == {"a"}
    scene.store("b", PROMPT[:1])
    scene.send("a", fresh(1))
    assert scene.where() == {"b"}
    assert scene.where(fresh(5)) == {"c"}
    for _ in range(33):
        scene.send("b", fresh(1))
    scene.store("b", PROMPT)
    assert scene.where() == {"c"}


def test_preble_exploits_more_than_half_and_redirects_from_long_queues() -> None:
    """Preble chooses the holder of more than half of the prompt, else the replica with the least work sent.

    A holder with a queue above twice the cold prefill is not chosen.
    """
    scene = Scene("preble")
    scene.store("a", PROMPT[:6])
    scene.send("a", fresh(19))
    assert scene.where() == {"a"}
    scene.send("a", fresh(2))  # 21 blocks wait, more than twice 10
    assert scene.where() == {"b", "c"}
    scene = Scene("preble")
    scene.store("a", PROMPT[:5])
    done = scene.send("a", fresh(9))
    scene.policy.observe(Finished("router-0", done, 5.0))
    assert scene.where() == {"b", "c"}  # half is not more than half; a had work in the last 3 minutes
    scene.now_s = 200.0
    assert scene.where() == {"a"}


@pytest.mark.parametrize("policy", ["ttft", "mooncake", "ttft-opt"])
def test_ttft_accepts_a_queue_as_long_as_the_cache_saves(policy: str) -> None:
    """The ttft policy accepts a queue shorter than the prefill that the cache saves.

    8 cached blocks are equal to a queue of 8 blocks.
    """
    scene = Scene(policy)
    scene.store("a", PROMPT[:8])
    scene.send("a", fresh(7))
    assert scene.where() == {"a"}
    scene.send("a", fresh(2))
    assert scene.where() == {"b", "c"}


def test_ttft_counts_the_remaining_work_of_running_prompts() -> None:
    """The ttft policy counts the remaining work of running prompts; their start reports the cached part."""
    scene = Scene("ttft", ["a", "b"])
    scene.send("b", fresh(2))
    request_id = scene.send("a", fresh(10))
    assert scene.where() == {"b"}
    scene.policy.observe(StartedWithHit("router-0", request_id, 0.0, cached_blocks=9))
    assert scene.where() == {"a"}
    scene = Scene("ttft", ["a", "b"])
    scene.send("a", fresh(10), starts=True)
    scene.now_s = 4 * BLOCK * FLAT.a_s
    scene.send("b", fresh(7))
    assert scene.where() == {"a"}


def test_only_ttft_opt_counts_on_prompts_that_wait() -> None:
    """Only ttft-opt counts on blocks of queued prompts to be in the cache."""
    for policy, expected in (("ttft-opt", {"a"}), ("ttft", {"b"})):
        scene = Scene(policy, ["a", "b"])
        scene.send("a", PROMPT[:6])  # 6 to wait for, 6 saved
        scene.send("b", fresh(1))
        if policy == "ttft-opt":
            assert scene.where() == {"a"}  # 6 + 4 against 1 + 10
        else:
            assert scene.where() == expected  # 6 + 10 against 1 + 10


def test_kappa_rho_recomputes_where_the_queue_is_longer_than_nine_recomputes() -> None:
    """With much unfinished work the congestion weight kappa is 8.

    Then a prompt of 10 blocks waits behind up to 90 blocks for its cache.
    """
    for queued, expected in ((88, {"a"}), (92, {"b", "c"})):
        scene = Scene("kappa-rho")
        scene.store("a", PROMPT)
        scene.send("a", fresh(queued, 50_000), starts=True)
        assert scene.where() == expected


def test_a_replica_that_is_gone_and_comes_back_has_no_past() -> None:
    """A replica that leaves and returns starts without a queue and without cached blocks.

    The local index has dropped its blocks.
    """
    for policy in sorted(set(POLICIES) - {"round-robin", "hash", "hash-bounded", "kvmesh"}):
        scene = Scene(policy)
        scene.store("a", PROMPT)
        for _ in range(3):
            scene.send("a", fresh(30), starts=True)
        scene.policy.observe(ReplicaLost("a"))
        assert isinstance(scene.policy, Rival)
        scene.policy.local_index.drop("a")
        scene.policy.local_index.add("a")
        assert scene.where(fresh(10, 70_000), tries=60) == set(NAMES), policy


def test_rivals_forget_finished_requests_and_ignore_unknown_ones() -> None:
    """An unknown finish or start changes nothing, and finished requests are forgotten."""
    for policy in POLICIES:
        scene = Scene(policy)
        scene.policy.observe(Started("router-9", "unknown", 0.0))
        scene.policy.observe(Finished("router-9", "unknown", 0.0))
        sent = scene.send("a", fresh(3), starts=True)
        scene.policy.observe(Finished("router-0", sent, 1.0))
        assert scene.ask().prefill in NAMES
