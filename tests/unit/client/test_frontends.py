"""The choice of a frontend: load balancing, open circuits after failures, closed again by an answer."""

from __future__ import annotations

import random

import pytest

from kvmesh.client.addresses import NO_REGION, by_region
from kvmesh.client.frontends import OPEN_MAX_S, Frontends

ADDRESSES = ("a:1", "b:2", "c:3")


def frontends(seed: int = 1) -> Frontends:
    """Return three frontends."""
    return Frontends({NO_REGION: ADDRESSES}, random.Random(seed))


def test_streams_are_balanced() -> None:
    """Each frontend gets the same number of streams."""
    choice = frontends()
    counts = dict.fromkeys(ADDRESSES, 0)
    for _ in range(30):
        address = choice.choose(0.0)
        choice.on_open(address)
        counts[address] += 1
    assert set(counts.values()) == {10}


def test_a_failed_frontend_opens_its_circuit_until_a_probe_is_answered() -> None:
    """No stream goes there before a probe was answered."""
    choice = frontends()
    choice.on_failure("a:1", 0.0)
    assert {choice.choose(0.0) for _ in range(50)} == {"b:2", "c:3"}
    assert choice.to_probe(0.1) == []
    assert choice.to_probe(1.0) == ["a:1"]
    assert choice.to_probe(1.0) == [], "one probe at a time"
    choice.on_failure("a:1", 1.0)
    assert choice.to_probe(1.2) == [], "the second backoff is longer"
    assert choice.to_probe(2.0) == ["a:1"]
    choice.on_answer("a:1", 2.0)
    assert {choice.choose(2.0) for _ in range(50)} == set(ADDRESSES)


def test_if_all_circuits_are_open_the_longest_open_one_is_chosen() -> None:
    """The client always chooses a frontend, and avoids the one that just failed."""
    choice = frontends()
    for at, address in enumerate(ADDRESSES):
        choice.on_failure(address, 10.0 * at)
    assert choice.choose(30.0) == "a:1"
    assert choice.choose(30.0, avoid="a:1") == "b:2"
    assert Frontends({NO_REGION: ["a:1"]}, random.Random(1)).choose(0.0, avoid="a:1") == "a:1"


def test_simultaneous_failures_of_streams_count_as_one() -> None:
    """A frontend with a thousand streams has the same backoff as one with one stream."""
    choice = frontends()
    for _ in range(1000):
        choice.on_failure("a:1", 5.0)
    assert choice.to_probe(5.0 + 0.4) == ["a:1"]


@pytest.mark.parametrize("seed", range(50))
def test_random_histories_keep_the_invariants(seed: int) -> None:
    """A frontend is always chosen. A closed circuit precedes open ones. The time of an open circuit is bounded."""
    draw, choice, now_s = random.Random(seed), frontends(seed), 0.0
    failed: dict[str, float] = {}
    streams = dict.fromkeys(ADDRESSES, 0)
    probed: set[str] = set()
    for _ in range(400):
        now_s += draw.random()
        address = draw.choice(ADDRESSES)
        match draw.randrange(4):
            case 0:
                choice.on_failure(address, now_s)
                failed[address] = now_s
                probed.discard(address)
            case 1:
                choice.on_answer(address, now_s)
                failed.pop(address, None)
                probed.discard(address)
            case 2:
                found = choice.choose(now_s)
                assert found not in failed or len(failed) == len(ADDRESSES)
                choice.on_open(found)
                streams[found] += 1
            case _:
                for each in ADDRESSES:
                    while streams[each] and draw.random() < 0.7:
                        choice.on_close(each)
                        streams[each] -= 1
        due = choice.to_probe(now_s)
        assert set(due) <= failed.keys() - probed
        probed |= set(due)
        for each, since_s in failed.items():
            assert each in probed or now_s - since_s <= 1.25 * OPEN_MAX_S, "its circuit stays open for ever"
        assert all(
            choice.has_other(each) == bool(set(ADDRESSES) - {each} - failed.keys()) for each in ADDRESSES
        )


@pytest.mark.parametrize("addresses", [[], ["a"], [":1"], ["a:"], ["a:0"], ["a:65536"], ["a:x"]])
def test_an_invalid_address_is_refused(addresses: list[str]) -> None:
    """The constructor raises, and sends nothing."""
    with pytest.raises(ValueError, match=r"is (needed|allowed)"):
        by_region(addresses)
