"""Members that do not fit their pool are found from the leases alone, in the same way everywhere."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh.membership.member import Member
from kvmesh.membership.pool_mismatch import PoolFacts, facts_of, mismatch, mismatches
from tests.unit.pools.leases import lease

ROUTER = lease("router-0", "router")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"model_version": "v2"}, 'model version "v2", the pool has "v1"'),
        ({"block_tokens": 16}, "block_tokens 16, the pool has 32"),
        (
            {"digests": {"tokenizer": "t2", "engine": "e1"}},
            'tokenizer digest "t2", the pool has "t1"',
        ),
        ({"digests": {"engine": "e2"}}, 'engine digest "e2", the pool has "e1"'),
        ({"digests": {}}, ""),
        ({"digests": {"later": "x"}}, ""),
    ],
)
def test_a_mismatch_names_both_values(changes: dict[str, object], reason: str) -> None:
    """An unknown digest is no mismatch: release 0.1.0 leases none."""
    members = [ROUTER, lease("d-0"), lease("d-1"), lease("d-2", **changes)]
    assert mismatches(members) == ({"d-2": reason} if reason else {})


def test_pools_are_compared_apart() -> None:
    """Another pool may have another version, and a frontend belongs to no pool."""
    other = {"pool": "b", "model_version": "v2", "digests": {"engine": "e2"}}
    members = [
        ROUTER,
        lease("a-0"),
        lease("b-router", "router", pool="b", model_version="v2"),
        lease("b-0", **other),
        lease("frontend-0", "frontend", pool="a", model_version="v9"),
    ]
    assert mismatches(members) == {}
    moved = [lease("b-0", **{**other, "pool": "a"}) if each.process_id == "b-0" else each for each in members]
    assert 'model version "v2", the pool has "v1"' in mismatches(moved)["b-0"]


def test_routers_decide_the_version_and_replicas_the_digests() -> None:
    """A replica of another version has no vote, even if all replicas have that version."""
    old = {"model_version": "v0", "digests": {"engine": "e0"}}
    members = [ROUTER, lease("d-0", **old), lease("d-1", **old), lease("d-2")]
    assert facts_of(members) == PoolFacts("v1", 32, {"tokenizer": "t1", "engine": "e1"})
    assert set(mismatches(members)) == {"d-0", "d-1"}
    assert facts_of(members[1:]).model_version == "v0"
    assert facts_of(members, lease("me", "router", model_version="v0")).digests == {"engine": "e0"}
    assert facts_of([]) == PoolFacts("", 0, {})


def test_a_long_value_is_cut() -> None:
    """A lease is data of another process: a log line stays short and printable."""
    text = mismatch(
        lease("d", digests={"engine": "\x1b" + "x" * 10_000}), PoolFacts("v1", 32, {"engine": "e"})
    )
    assert len(text) < 200 and "\x1b" not in text and "..." in text


def test_every_order_of_the_leases_gives_the_same_result() -> None:
    """The most frequent digest wins, in a tie that of the smallest process id: so says a count by hand."""
    for seed in range(300):
        rng = random.Random(seed)
        members: list[Member] = [ROUTER]
        for number in range(rng.randint(1, 6)):
            digest = rng.choice(["e1", "e2", "e3", ""])
            version = rng.choice(["v1", "v1", "v1", "v2"])
            members.append(lease(f"d-{number}", digests={"engine": digest}, model_version=version))
        voting = [one.digests["engine"] for one in members[1:] if one.model_version == "v1"]
        counts = Counter(digest for digest in voting if digest)
        wanted = next((each for each in voting if counts[each] and counts[each] == max(counts.values())), "")
        found = mismatches(members)
        assert facts_of(members).digests.get("engine", "") == wanted, f"seed={seed}"
        assert set(found) == {
            one.process_id
            for one in members[1:]
            if one.model_version != "v1" or (one.digests["engine"] and one.digests["engine"] != wanted)
        }, f"seed={seed}"
        rng.shuffle(members)
        assert mismatches(members) == found, f"seed={seed}"
