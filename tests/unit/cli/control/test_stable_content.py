"""`snapshot stable --direct`: the content and the term, on random snapshots and through a real fence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cli.control.stable_content import (
    all_to_stable,
    name_order,
    next_term,
    stable_snapshot,
    term_number,
)
from kvmesh.snapshot.content import ENDED_MAX, Content, Cordon, PoolTrack, RolloutState, Track, check
from kvmesh.snapshot.fence import Applied, Fence
from kvmesh.snapshot.published import JUMP_MAX, NO_NAME, TERM_MAX, Name, Term, publish

IDS = st.integers(0, 30).map(lambda number: f"r-{number}")


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Return a valid content, with or without a rollout."""
    canary = draw(st.integers(0, 50))
    baseline = draw(st.integers(0, 50))
    rollout = draw(IDS)
    ended = [each for each in draw(st.lists(IDS, unique=True, max_size=ENDED_MAX)) if each != rollout]
    pools = [PoolTrack("stable", "v1", Track.STABLE, 100 - canary - baseline)]
    pools.append(PoolTrack("next", "v2", Track.CANARY, canary))
    pools.append(PoolTrack("young", "v1", Track.BASELINE, baseline))
    pools += [PoolTrack("old", "v0", is_closed=True)] if draw(st.booleans()) else []
    return Content(
        tuple(draw(st.permutations(pools))),
        rollout=rollout,
        rollout_state=draw(st.sampled_from(list(RolloutState))),
        step=draw(st.integers(0, 5)),
        only_tenants=draw(st.frozensets(st.sampled_from("abc"))),
        cordons=(Cordon("decode-0", is_draining=True),),
        ended_rollouts=tuple(ended),
    )


@given(
    contents(),
    st.integers(1, TERM_MAX - 1),
    st.lists(st.integers(0, TERM_MAX - 1) | st.integers(0, JUMP_MAX)),
)
def test_every_receiver_takes_the_snapshot(before: Content, number: int, numbers: list[int]) -> None:
    """After every snapshot in force, and above all terms that others have seen and a control process believes."""
    check(before)
    believed = (number, *(each for each in numbers if each <= number + JUMP_MAX))
    board = publish(Term(number, "control-9"), 12, before)
    made = stable_snapshot(board, numbers, "alice@host", 5)
    assert made.name.term > Term(max(believed), "~")
    assert made.content.stable.pool == "stable"
    assert [pool.weight_percent for pool in made.content.pools if pool.pool != "stable"].count(0) == (
        len(before.pools) - 1
    )
    fence = Fence()
    fence.offer(board)
    fence.remember(before.ended_rollouts)
    assert fence.offer(made) == Applied(made.name)
    assert made.content.cordons == before.cordons


@given(contents())
def test_a_rollout_under_way_is_taken_back_for_ever(before: Content) -> None:
    """A promoted one is not: its pool is stable."""
    after = all_to_stable(before, 5)
    is_promoted = before.rollout_state in (RolloutState.PROMOTING, RolloutState.COMPLETED)
    assert (before.rollout in after.ended_rollouts) != is_promoted
    assert len(after.ended_rollouts) <= ENDED_MAX
    assert all_to_stable(after, 5) == after
    for track in (Track.CANARY, Track.BASELINE):
        closed = before.of_track(track)
        assert closed is not None
        assert getattr(after.pool(closed.pool), "is_closed", False)


def test_the_term_names_the_operator() -> None:
    """Its number is above all, and never above the largest."""
    assert next_term(3, (9, 4), "alice@host") == Term(10, "operator:alice@host")
    assert next_term(9, (3,), "a") == Term(10, "operator:a")
    assert next_term(0, (), "a") == Term(1, "operator:a")
    assert next_term(TERM_MAX, (), "a").number == TERM_MAX


def test_a_junk_number_does_not_use_up_the_terms() -> None:
    """One broken lease, or junk in Redis, is no term: control processes would not believe the snapshot either."""
    assert next_term(7, (7 + JUMP_MAX,), "a").number == 8 + JUMP_MAX
    assert next_term(7, (8 + JUMP_MAX, TERM_MAX, 9), "a").number == 10


def test_the_number_of_a_term_is_read_from_a_lease() -> None:
    """A lease may be hostile, or without a snapshot."""
    assert term_number("7.control-0/3") == 7
    assert [term_number(each) for each in ("", "x.y/3", "-1.a/1", "١.a/1", "9" * 40 + ".a/1")] == [0] * 5


def test_the_order_of_a_name_is_read_from_a_lease() -> None:
    """It is that of the name itself, also if the leader has separators in its name. Other texts are below every name."""
    for leader in ("control-0", "a.b/c", "operator:alice@host"):
        name = Name(Term(7, leader), 12)
        assert name_order(str(name)) == name.order
    hostile = ("", "7.control-0", "x.y/3", "0.a/3", "7.a/", "7.a/-1", "7.a/١", "7.a/" + "9" * 21)
    assert {name_order(each) for each in hostile} == {NO_NAME.order}
