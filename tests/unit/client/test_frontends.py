"""The choice of a frontend: spread, away from what failed, back when it answers."""

from __future__ import annotations

import random

import pytest

from kvmesh.client.frontends import OPEN_MAX_S, Frontends

ADDRESSES = ("a:1", "b:2", "c:3")


def frontends(seed: int = 1) -> Frontends:
    """Return three frontends."""
    return Frontends(ADDRESSES, random.Random(seed))


def test_streams_are_spread() -> None:
    """Each gets the same number, however many there are."""
    choice = frontends()
    counts = dict.fromkeys(ADDRESSES, 0)
    for _ in range(30):
        address = choice.choose()
        choice.on_open(address)
        counts[address] += 1
    assert set(counts.values()) == {10}


def test_one_that_failed_rests_and_comes_back_when_it_answers() -> None:
    """Nothing is sent there until a probe was answered."""
    choice = frontends()
    choice.on_failure("a:1", 0.0)
    assert {choice.choose() for _ in range(50)} == {"b:2", "c:3"}
    assert choice.to_probe(0.1) == []
    assert choice.to_probe(1.0) == ["a:1"]
    assert choice.to_probe(1.0) == [], "one probe at a time"
    choice.on_failure("a:1", 1.0)
    assert choice.to_probe(1.2) == [], "the second rest is longer"
    assert choice.to_probe(2.0) == ["a:1"]
    choice.on_answer("a:1")
    assert {choice.choose() for _ in range(50)} == set(ADDRESSES)


def test_where_all_failed_the_one_that_rested_most_is_taken() -> None:
    """A client never has nobody to ask, and rather asks another than the one that just failed."""
    choice = frontends()
    for at, address in enumerate(ADDRESSES):
        choice.on_failure(address, 10.0 * at)
    assert choice.choose() == "a:1"
    assert choice.choose(avoid="a:1") == "b:2"
    assert Frontends(["a:1"], random.Random(1)).choose(avoid="a:1") == "a:1"


def test_many_streams_that_fail_together_are_one_failure() -> None:
    """A frontend with a thousand streams rests no longer than one with one."""
    choice = frontends()
    for _ in range(1000):
        choice.on_failure("a:1", 5.0)
    assert choice.to_probe(5.0 + 0.4) == ["a:1"]


@pytest.mark.parametrize("seed", range(50))
def test_random_histories_keep_the_promises(seed: int) -> None:
    """Somebody is always chosen; one that works is never passed over for one that failed; rests are bounded."""
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
                choice.on_answer(address)
                failed.pop(address, None)
                probed.discard(address)
            case 2:
                found = choice.choose()
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
            assert each in probed or now_s - since_s <= 1.25 * OPEN_MAX_S, "it rests for ever"
        assert all(
            choice.has_other(each) == bool(set(ADDRESSES) - {each} - failed.keys()) for each in ADDRESSES
        )


@pytest.mark.parametrize("addresses", [[], ["a"], [":1"], ["a:"], ["a:0"], ["a:65536"], ["a:x"]])
def test_an_address_that_cannot_be_one_is_refused(addresses: list[str]) -> None:
    """Before anything is sent."""
    with pytest.raises(ValueError, match=r"is (needed|allowed)"):
        Frontends(addresses, random.Random(1))
