"""Fencing: whatever order snapshots arrive in, a receiver never goes back and never raises a condemned canary."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from kvmesh.snapshot.content import ENDED_MAX, Content, PoolTrack, RolloutState, Track, check
from kvmesh.snapshot.fence import Applied, Fence, Rejected
from kvmesh.snapshot.published import Published, Term, publish
from tests.unit.snapshot.test_content import STABLE, split


def test_two_leaders_of_one_term_need_no_arbiter() -> None:
    """Receivers that hear both leaders in either order end with the same snapshot."""
    one = publish(Term(3, "control-0"), 9, split(5))
    other = publish(Term(3, "control-1"), 1, Content((STABLE,)))
    for order in ((one, other), (other, one)):
        fence = Fence()
        for each in order:
            fence.offer(each)
        assert fence.current == other


def test_a_snapshot_in_force_is_acknowledged_again() -> None:
    """A lost acknowledgement is repeated, an older snapshot is ignored, and a damaged copy is not acknowledged."""
    fence = Fence()
    first, second = (publish(Term(1, "c"), version, Content((STABLE,))) for version in (1, 2))
    fence.offer(first)
    assert fence.offer(second) == Applied(second.name)
    assert fence.offer(second) == Applied(second.name)
    assert fence.offer(first) is None
    assert fence.offer(publish(Term(1, "c"), 2, split(5))) is None


def test_a_refused_snapshot_changes_nothing() -> None:
    """A process that cannot serve a content keeps the one before and says why."""
    fence = Fence(lambda content: "no tokenizer" if content.canary_percent else "")
    kept, refused = publish(Term(1, "c"), 1, Content((STABLE,))), publish(Term(2, "c"), 1, split(5))
    fence.offer(kept)
    assert fence.offer(refused) == Rejected(refused.name, "no tokenizer")
    assert fence.current == kept and fence.highest_term == Term(2, "c")
    later = publish(Term(2, "c"), 2, Content((STABLE,)))
    assert fence.offer(later) == Applied(later.name) and fence.rejected is None


def test_no_order_of_snapshots_goes_back_or_raises_a_condemned_canary() -> None:
    """Random leaders, terms, losses and repeats: names ascend, and an ended rollout never has weight again."""
    for seed in range(300):
        rng = random.Random(seed)
        fence, seen = Fence(), []
        made: list[Published] = []
        for _ in range(60):
            if made and rng.random() < 0.4:
                snapshot = rng.choice(made)
            else:
                rollout = f"r{rng.randrange(3)}"
                content = split(rng.choice((0, 1, 5, 50)), rng.choice((0, 1)), rollout)
                if rng.random() < 0.3:
                    content = replace(Content((STABLE,)), rollout=rollout, ended_rollouts=(rollout,))
                term = Term(rng.randrange(1, 6), f"c{rng.randrange(2)}")
                snapshot = publish(term, rng.randrange(1, 6), content)
                made.append(snapshot)
            ended = set(fence.ended_rollouts)
            before = fence.current
            fence.offer(snapshot)
            current = fence.current
            if current is not before:
                assert current is not None
                assert before is None or current.name.order > before.name.order, f"seed={seed}"
                assert not (current.content.canary_percent and current.content.rollout in ended), (
                    f"seed={seed}"
                )
                seen.append(current)
        assert seen, f"seed={seed}"


def test_the_latest_ended_rollouts_are_remembered() -> None:
    """The memory is bounded, and forgets the oldest."""
    fence = Fence()
    fence.remember(f"r{number}" for number in range(ENDED_MAX + 5))
    assert fence.ended_rollouts == tuple(f"r{number}" for number in range(5, ENDED_MAX + 5))


def serves_v1(content: Content) -> str:
    """A frontend without another version than v1."""
    unknown = [
        pool.pool for pool in content.pools if pool.model_version != "v1" and pool.track is not Track.IDLE
    ]
    return f"{unknown} is unknown" if unknown else ""


CANARY_V1 = PoolTrack("next", "v1", Track.CANARY, 25)
OF_V1 = (PoolTrack("stable", "v1", Track.STABLE, 75), CANARY_V1)


def test_a_refused_snapshot_that_ends_the_rollout_in_force_takes_its_weight() -> None:
    """The receiver cannot serve the snapshot that goes back; its canary has no weight nevertheless, for ever."""
    fence = Fence(serves_v1)
    baking = publish(Term(1, "c"), 1, Content(OF_V1, rollout="r1", rollout_state=RolloutState.BAKING))
    fence.offer(baking)
    assert fence.in_force == baking
    stable = PoolTrack("stable", "v9", Track.STABLE, 100)
    back = publish(Term(1, "c"), 2, Content((stable,), rollout="r1", ended_rollouts=("r1",)))
    assert isinstance(fence.offer(back), Rejected)
    assert fence.current is baking and fence.is_reduced and fence.in_force is not None
    assert [(pool.track, pool.weight_percent) for pool in fence.in_force.content.pools] == [
        (Track.STABLE, 100),
        (Track.IDLE, 0),
    ]
    check(fence.in_force.content)
    kept = fence.in_force
    fence.offer(back)
    assert fence.in_force is kept
    later = publish(Term(1, "c"), 3, Content((PoolTrack("stable", "v1", Track.STABLE, 100),)))
    assert isinstance(fence.offer(later), Applied)
    assert fence.in_force is fence.current is later


def test_the_first_snapshot_counts_with_its_stable_pool_alone_if_the_canary_cannot_be_served() -> None:
    """A restarted receiver refuses the snapshot by its canary; it serves the snapshot's stable pool, not a guess."""
    fence = Fence(serves_v1)
    canary = PoolTrack("next", "v2", Track.CANARY, 25)
    first = publish(Term(2, "c"), 4, Content((OF_V1[0], canary), rollout="r1"))
    assert isinstance(fence.offer(first), Rejected)
    assert fence.current is None and fence.is_reduced and fence.in_force is not None
    assert fence.in_force.name == first.name and fence.in_force.content.stable.weight_percent == 100
    assert fence.in_force.content.canary_percent == 0
    kept = fence.in_force
    assert isinstance(fence.offer(first), Rejected) and fence.in_force is kept
    lower = publish(Term(1, "c"), 9, Content((PoolTrack("other", "v1", Track.STABLE, 100),)))
    assert fence.offer(lower) is None and fence.in_force is kept
    unknown = publish(Term(2, "c"), 5, Content((PoolTrack("stable", "v2", Track.STABLE, 100),)))
    assert isinstance(fence.offer(unknown), Rejected) and fence.in_force is kept


def refuses_steps(refused: set[int], content: Content) -> str:
    return "no" if content.step in refused else ""


def test_no_refusals_leave_an_ended_rollout_in_force() -> None:
    """Random snapshots at a receiver that refuses half of them: no content in force has a weight of an ended rollout."""
    for seed in range(300):
        rng = random.Random(seed)
        refused = {version for version in range(40) if rng.random() < 0.5}
        fence = Fence(partial(refuses_steps, refused))
        last = None
        for version in range(1, 40):
            rollout = f"r{rng.randrange(3)}"
            content = replace(split(rng.choice((0, 5, 50)), rng.choice((0, 1)), rollout), step=version)
            if rng.random() < 0.3:
                content = replace(
                    Content((STABLE,)), rollout=rollout, ended_rollouts=(rollout,), step=version
                )
            fence.offer(publish(Term(1, "c"), version, content))
            in_force = fence.in_force
            if in_force is None:
                continue
            check(in_force.content)
            assert last is None or in_force.name.order >= last.order, f"seed={seed}"
            last = in_force.name
            if in_force.content.rollout in fence.ended_rollouts:
                tracks = {pool.track for pool in in_force.content.pools}
                assert not tracks & {Track.CANARY, Track.BASELINE}, f"seed={seed}"


def promotion(state: RolloutState, ended: tuple[str, ...] = ()) -> Content:
    """Return the content of rollout r1 behind its last step: of a promotion with "next" stable, else after an undo."""
    is_promoted = state in (RolloutState.PROMOTING, RolloutState.COMPLETED)
    old, new = PoolTrack("stable", "v1"), PoolTrack("next", "v1")
    pools = (old, replace(new, track=Track.STABLE, weight_percent=100))
    if not is_promoted:
        pools = (STABLE, replace(new, is_closed=True))
    return Content(pools, rollout="r1", rollout_state=state, ended_rollouts=ended)


def test_an_undone_promotion_is_never_applied_again() -> None:
    """A leader with an old document publishes the promotion under a higher name. The old pool keeps all weight."""
    fence = Fence()
    promoting = promotion(RolloutState.PROMOTING)
    fence.offer(publish(Term(1, "c"), 1, promoting))
    assert fence.in_force is not None and fence.in_force.content.stable.pool == "next"
    undone = publish(Term(1, "c"), 2, promotion(RolloutState.ROLLING_BACK, ("r1",)))
    assert fence.offer(undone) == Applied(undone.name)
    again = publish(Term(2, "c"), 1, promoting)
    refused = Rejected(again.name, 'rollout "r1" was taken back; it must not be promoted')
    assert fence.offer(again) == refused
    assert fence.current is fence.in_force is undone
    over = publish(Term(2, "c"), 2, promotion(RolloutState.ROLLED_BACK, ("r1",)))
    assert fence.offer(over) == Applied(over.name)


def test_a_restarted_receiver_does_not_take_the_stable_pool_of_an_undone_promotion() -> None:
    """It knows the rollouts that were taken back, and no snapshot. Without one the process serves its first pool."""
    fence = Fence()
    fence.remember(["r1"])
    assert isinstance(fence.offer(publish(Term(1, "c"), 1, promotion(RolloutState.PROMOTING))), Rejected)
    assert fence.current is None and fence.in_force is None
    undone = publish(Term(1, "c"), 2, promotion(RolloutState.ROLLING_BACK, ("r1",)))
    assert fence.offer(undone) == Applied(undone.name)


def test_a_promotion_that_names_itself_as_taken_back_is_refused() -> None:
    """A leader may know of the end by a receiver, and not have taken the rollout back yet."""
    fence = Fence()
    baking = publish(Term(1, "c"), 1, Content(OF_V1, rollout="r1", rollout_state=RolloutState.BAKING))
    fence.offer(baking)
    both = publish(Term(1, "c"), 2, promotion(RolloutState.PROMOTING, ("r1",)))
    assert isinstance(fence.offer(both), Rejected)
    assert fence.current is baking and fence.in_force is not None
    assert fence.in_force.content.stable == PoolTrack("stable", "v1", Track.STABLE, 100)


def test_a_completed_rollout_is_applied_whatever_the_receiver_remembers() -> None:
    """The old pool may be gone, and nothing takes a completed rollout back, so refusing it would never end."""
    for ended in ((), ("r1",)):
        fence = Fence()
        fence.remember(ended)
        completed = publish(Term(3, "c"), 1, promotion(RolloutState.COMPLETED))
        assert fence.offer(completed) == Applied(completed.name)
        assert fence.current is fence.in_force is completed


def test_a_promotion_in_force_keeps_its_content_when_its_undo_cannot_be_served() -> None:
    """The receiver knows no older pool that it may serve. Its content stays the same object, so nothing changes twice."""
    fence = Fence(serves_v1)
    promoting = publish(Term(1, "c"), 1, promotion(RolloutState.PROMOTING))
    fence.offer(promoting)
    undone = replace(
        promotion(RolloutState.ROLLING_BACK, ("r1",)), pools=(PoolTrack("old", "v0", Track.STABLE, 100),)
    )
    assert isinstance(fence.offer(publish(Term(1, "c"), 2, undone)), Rejected)
    assert fence.current is fence.in_force is promoting and fence.ended_rollouts == ("r1",)
