"""The choice of a pool: weights hold, sessions stay, and a rising weight moves a session once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvmesh.snapshot.assignment import Assignment
from kvmesh.snapshot.content import Content, Track
from tests.unit.snapshot.test_content import STABLE, split

SESSIONS = [f"session-{number}" for number in range(20_000)]


def tracks(content: Content, tenant: str = "acme") -> list[Track]:
    """Return the track of each session."""
    assignment = Assignment(content)
    return [assignment.choose(tenant, session).track for session in SESSIONS]


def test_shares_follow_the_weights() -> None:
    """Each pool gets its percentage of sessions, within four standard deviations."""
    found = Counter(tracks(split(10, 5)))
    assert abs(found[Track.CANARY] - 2000) < 170 and abs(found[Track.BASELINE] - 1000) < 125


def test_a_session_moves_forward_once_and_back_once() -> None:
    """Over rising steps a session enters the canary at most once; at weight 0 every session is at stable."""
    was = [Track.STABLE] * len(SESSIONS)
    moves = [0] * len(SESSIONS)
    for weight in (1, 5, 25, 50, 100):
        now = tracks(split(weight))
        for at, (before, after) in enumerate(zip(was, now, strict=True)):
            moves[at] += before is not after
            assert not (before is Track.CANARY and after is not Track.CANARY)
        was = now
    assert max(moves) == 1 and min(moves) == 1
    assert set(tracks(Content((STABLE,)))) == {Track.STABLE}


def test_rollouts_choose_independently() -> None:
    """The sessions of one rollout's canary are no likelier in the next one's."""
    first, second = tracks(split(50, rollout="r1")), tracks(split(50, rollout="r2"))
    both = sum(one is other is Track.CANARY for one, other in zip(first, second, strict=True))
    assert abs(both - 5000) < 250


def test_tenants_are_kept_away_or_go_first() -> None:
    """`never` wins over `only`, and both leave other tenants at stable."""
    content = replace(split(100), only_tenants=frozenset({"a", "b"}), never_tenants=frozenset({"b"}))
    assert set(tracks(content, "a")) == {Track.CANARY}
    assert set(tracks(content, "b")) == set(tracks(content, "c")) == {Track.STABLE}
