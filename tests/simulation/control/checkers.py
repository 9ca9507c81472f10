"""Checks of a simulated control plane: safety over its whole history, and agreement at its end.

`World.offer` checks at each receiver that no name goes back, and that no condemned canary has weight.
"""

from __future__ import annotations

from itertools import pairwise

from kvmesh.snapshot.content import RolloutState
from tests.simulation.control.world import World


def check_weights_have_documents(world: World) -> None:
    """Every applied weight of a canary stands in a document that Redis had written before."""
    written: dict[tuple[str, int, int], bool] = {}
    for document in world.redis.written:
        written[document.id, document.step, document.weight_percent] = True
    for at_s, receiver, _, snapshot in world.applied:
        content = snapshot.content
        weight = content.canary_percent
        if weight:
            found = (content.rollout, content.step, weight) in written
            assert found, f"seed={world.seed}: {receiver} at {at_s:.1f} s has {weight} % without a document"


def check_promotions_have_documents(world: World) -> None:
    """The stable pool changes only by a promotion that a document has decided, or by an operator's command."""
    promoted = {document.to_pool for document in world.redis.written if document.state_name == "PROMOTING"}
    for at_s, receiver, _, snapshot in world.applied:
        stable = snapshot.content.stable.pool
        is_allowed = stable == "stable" or stable in promoted or bool(snapshot.content.stable_revision)
        assert is_allowed, (
            f"seed={world.seed}: {stable} is stable at {receiver} at {at_s:.1f} s without a document"
        )


def check_stable_pool_moves_for_a_reason(world: World) -> None:
    """The stable pool changes by its promotion, by the end of the one before it, or by a new command for it."""
    pools = {document.id: document.to_pool for document in world.redis.written}
    snapshots = {snapshot.name.order: snapshot.content for _, _, _, snapshot in world.applied}
    for (_, before), (order, after) in pairwise(sorted(snapshots.items())):
        if before.stable.pool == after.stable.pool:
            continue
        ended = set(after.ended_rollouts) - set(before.ended_rollouts)
        is_promoted = after.rollout_state.is_promoted and pools.get(after.rollout) == after.stable.pool
        is_undone = any(pools.get(rollout) == before.stable.pool for rollout in ended)
        is_new = after.stable_revision > before.stable_revision
        is_commanded = is_new and after.stable.pool in world.commanded.get(after.stable_revision, ())
        is_allowed = is_promoted or is_undone or is_commanded
        assert is_allowed, (
            f"seed={world.seed}: {before.stable.pool} -> {after.stable.pool} at {order}: {after}"
        )


def check_commands_are_followed(world: World) -> None:
    """A snapshot that says that it follows a command has the pool of that command stable when it says so first."""
    snapshots = {snapshot.name.order: snapshot.content for _, _, _, snapshot in world.applied}
    seen = 0
    for order, content in sorted(snapshots.items()):
        if content.stable_revision > seen:
            seen = content.stable_revision
            is_followed = content.stable.pool in world.commanded.get(seen, ())
            assert is_followed, f"seed={world.seed}: command {seen} is not followed at {order}: {content}"


def check_completed_rollouts_stay(world: World) -> None:
    """A rollout that a receiver has as completed is never taken back: its old pool may be gone."""
    completed: set[str] = set()
    for at_s, receiver, _, snapshot in world.applied:
        content = snapshot.content
        if content.rollout_state is RolloutState.COMPLETED:
            completed.add(content.rollout)
        found = completed.intersection(content.ended_rollouts)
        assert not found, f"seed={world.seed}: {receiver} at {at_s:.1f} s takes {found} back"


def check_agreement(world: World) -> None:
    """After the healing all receivers have the leader's snapshot, and Redis has it, too."""
    leader = world.leader()
    assert leader is not None, f"seed={world.seed}: no leader"
    published = leader.core.publisher.published
    assert published is not None, f"seed={world.seed}: {leader.name} published nothing"
    behind = [peer.name for peer in world.peers.values() if peer.fence.current != published]
    assert not behind, f"seed={world.seed}: {behind} lack {published.name}"
    assert world.redis.board == published, f"seed={world.seed}: the board has {world.redis.board}"
    content = published.content
    assert not content.running_rollout, (
        f"seed={world.seed}: {content.rollout} is {content.rollout_state.name}"
    )
    assert content.canary_percent == 0, f"seed={world.seed}"


def check_ended_rollouts(world: World) -> None:
    """A rollout that a receiver knows as taken back has not been promoted: its pool is stable by another one only."""
    leader = world.leader()
    assert leader is not None
    ended = {rollout for peer in world.peers.values() for rollout in peer.fence.ended_rollouts}
    for document in leader.core.library.rollouts:
        if document.id in ended:
            assert document.is_taken_back, f"seed={world.seed}: {document.id} is {document.state_name}"


def check_verdicts(world: World, *, is_bad: bool) -> None:
    """Whatever observations are lost, late or told twice: the judge takes no good version back, and passes no bad one."""
    for document in world.redis.written:
        if is_bad and document.to_pool == "next":  # a rollout back to "stable" has the good version
            assert document.state_name != "PROMOTING", f"{document.id} is promoted: {document.reason}"
        failed = [gate.name for gate in document.verdict.gates if gate.result == "fails"]
        assert is_bad or not failed, f"{document.id} fails {failed}: {document.reason}"


CHECKS = (
    check_weights_have_documents,
    check_promotions_have_documents,
    check_stable_pool_moves_for_a_reason,
    check_commands_are_followed,
    check_completed_rollouts_stay,
    check_agreement,
    check_ended_rollouts,
)
