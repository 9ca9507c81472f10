"""The region of a session: shares are met, and few sessions move."""

from __future__ import annotations

import random

import pytest

from kvmesh.regions.targets import SPAN, Targets, position

SESSIONS = [position("tenant", f"session-{n}") for n in range(4000)]


def chosen(others: tuple[str, ...], shares: dict[str, float]) -> list[str]:
    """Return the region of every session."""
    targets = Targets("eu", others, shares)
    return [targets.choose(at) for at in SESSIONS]


@pytest.mark.parametrize("seed", range(50))
def test_sessions_follow_the_shares(seed: int) -> None:
    """Each region gets its share of sessions, for one to four targets, also where all of them leave."""
    rng = random.Random(seed)
    others = ("ap", "sa", "uk", "us")[: rng.randrange(1, 5)]
    raw = {name: rng.random() for name in others}
    scale = rng.choice((1.0, rng.random())) / sum(raw.values())
    shares = {name: value * scale for name, value in raw.items()}
    regions = chosen(others, shares)
    for name, share in shares.items():
        assert regions.count(name) / len(regions) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("seed", range(50))
def test_a_growing_share_takes_sessions_from_home_alone(seed: int) -> None:
    """With at most two targets no session leaves another region, and a falling share sends its own sessions home."""
    rng = random.Random(seed)
    others = ("ap", "us")
    before = {"ap": rng.uniform(0, 0.5), "us": rng.uniform(0, 0.5)}
    grown = rng.choice(others)
    after = {**before, grown: before[grown] + rng.uniform(0, 1 - sum(before.values()))}
    for old, new in zip(chosen(others, before), chosen(others, after), strict=True):
        assert old == new or (old, new) == ("eu", grown)


def test_a_third_target_moves_others_only_where_intervals_meet() -> None:
    """Up to a third each, three targets behave like two."""
    others = ("ap", "sa", "us")
    before = chosen(others, {"ap": 0.1, "sa": 0.2, "us": 0.3})
    after = chosen(others, {"ap": 0.3, "sa": 0.2, "us": 0.3})
    assert {(old, new) for old, new in zip(before, after, strict=True) if old != new} == {("eu", "ap")}


def test_a_pinned_session_stays_at_home() -> None:
    """A target outside of a tenant's regions is not chosen."""
    targets = Targets("eu", ("us",), {"us": 1.0})
    assert targets.choose(SPAN - 1) == "us"
    assert targets.choose(SPAN - 1, ("eu",)) == "eu"
    assert targets.choose(0, ("eu", "us")) == "us"


def test_positions_differ_by_tenant() -> None:
    """Equal session ids of two tenants have two positions."""
    assert position("a", "s") != position("b", "s")
