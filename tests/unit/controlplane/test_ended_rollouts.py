"""Rollouts that were taken back, and the stable pool behind each: the highest snapshot counts."""

from __future__ import annotations

from itertools import permutations

import pytest

from controlplane import ended_rollouts
from controlplane.ended_rollouts import EndedRollouts
from kvmesh.snapshot.content import Content, PoolTrack, RolloutState, Track
from kvmesh.snapshot.published import Published, Term, publish


def snapshot(term: int, version: int, stable: str, ended: tuple[str, ...], promoted: str = "") -> Published:
    """Return a snapshot with all weight on `stable`. `promoted`: the rollout that it promotes."""
    return publish(
        Term(term, "c"),
        version,
        Content(
            (PoolTrack(stable, "v1", Track.STABLE, 100),),
            rollout=promoted,
            rollout_state=RolloutState.PROMOTING if promoted else RolloutState.NONE,
            ended_rollouts=ended,
        ),
    )


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_highest_snapshot_counts_in_any_order(order: tuple[int, ...]) -> None:
    """A receiver that lagged behind for long names a pool that another rollout has replaced."""
    heard = [
        snapshot(5, 8, "old", ("r1",)),
        snapshot(6, 2, "new", ("r1", "r2")),
        snapshot(6, 1, "other", ("r1",)),
    ]
    ended = EndedRollouts()
    for each in order:
        ended.see(heard[each])
    assert dict(ended) == {"r1": "new", "r2": "new"}


def test_an_id_alone_has_no_pool_and_takes_none_away() -> None:
    """A receiver names what was taken back, and not what was stable behind it."""
    ended = EndedRollouts()
    ended.note(["r1"])
    assert dict(ended) == {"r1": ""}
    ended.see(snapshot(5, 8, "stable", ("r1",)))
    ended.note(["r1"])
    assert dict(ended) == {"r1": "stable"}


def test_a_promotion_says_nothing_of_the_pool_behind_its_undo() -> None:
    """A leader may hear of the undo while it publishes the promotion once more. Of another rollout it says something."""
    ended = EndedRollouts()
    ended.see(snapshot(9, 1, "next", ("r0", "r1"), promoted="r1"))
    assert dict(ended) == {"r0": "next", "r1": ""}
    ended.see(snapshot(5, 8, "stable", ("r1",)))
    assert ended["r1"] == "stable"


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign receivers can name rollouts without end."""
    monkeypatch.setattr(ended_rollouts, "KEPT", 3)
    ended = EndedRollouts()
    ended.note(f"r{each}" for each in range(10))
    ended.see(snapshot(5, 8, "stable", ("r9", "r10")))
    assert dict(ended) == {"r8": "", "r9": "stable", "r10": "stable"}
