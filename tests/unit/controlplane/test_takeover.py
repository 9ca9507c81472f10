"""A new leader's repair of documents that disagree with the snapshots in force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from controlplane import takeover
from controlplane.rollouts import transitions
from controlplane.rollouts.commands import start
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import RolloutSettings
from controlplane.rollouts.view import View
from controlplane.snapshots.desired import Desired
from controlplane.snapshots.publication import wanted
from kvmesh.cli.control.stable_content import all_to_stable
from kvmesh.snapshot.content import Content, PoolTrack, RolloutState, Track

VERSIONS = {"stable": "v1", "next": "v2"}
CALM = Content((PoolTrack("next", "v2"), PoolTrack("stable", "v1", Track.STABLE, 100)))


def pending(name: str = "r1") -> RolloutDocument:
    """Return a rollout that has just been started."""
    return start(
        name,
        RolloutSettings(to_pool="next", steps_percent=(10, 50, 100)),
        from_pool="stable",
        from_version="v1",
        to_version="v2",
        by="test",
        view=View(has_redis=True, has_lease=True),
        now_s=1000.0,
        is_forced=True,
    ).document


def baking(step: int, weight: int) -> RolloutDocument:
    """Return a rollout that bakes `step` at `weight` percent."""
    document = transitions.preparing(pending(), "ready", 1001.0)
    for each in range(1, step + 1):
        document = transitions.baking(document, each, "next", 1002.0)
    return changed(document, weight_percent=weight, revision=9)


def content_of(document: RolloutDocument) -> Content:
    """Return the content that `document` leads to."""
    return wanted(CALM, Desired(), document, VERSIONS)


def reconciled(
    document: RolloutDocument, base: Content | None, ended: frozenset[str] = frozenset()
) -> list[RolloutDocument]:
    """Return what a new leader writes."""
    return list(takeover.reconcile([document], base, ended, 2000.0))


@pytest.mark.parametrize("document", [baking(1, 10), baking(2, 50), pending()])
def test_a_document_that_led_to_the_snapshot_stays(document: RolloutDocument) -> None:
    """Nothing is written if the document is where the receivers are, or one write ahead of them."""
    assert reconciled(document, content_of(document)) == []
    if document.weight_percent:
        assert (
            reconciled(document, content_of(changed(document, weight_percent=document.weight_percent - 5)))
            == []
        )
    assert reconciled(baking(2, 10), content_of(baking(1, 10))) == []
    assert reconciled(pending(), CALM) == reconciled(pending(), None) == []


@pytest.mark.parametrize(
    ("base", "weight"), [(None, 0), (content_of(baking(2, 30)), 30), (content_of(baking(1, 10)), 0)]
)
def test_a_document_far_ahead_of_the_receivers_keeps_its_step_and_rises_again(
    base: Content | None, weight: int
) -> None:
    """No takeover moves more traffic than one rise."""
    (found,) = reconciled(baking(2, 50), base)
    assert (found.state, found.step, found.weight_percent) == (RolloutState.BAKING, 2, weight)


@pytest.mark.parametrize(
    "document",
    [
        pending(),
        baking(2, 50),
        transitions.promoting(baking(3, 100), "passed", 1005.0),
        transitions.taken_back(baking(2, 50), "fails", 1005.0),
    ],
)
def test_a_rollout_of_a_stale_state_folder_ends_and_moves_no_traffic(document: RolloutDocument) -> None:
    """A later rollout made a third pool stable. The document of the earlier one was restored from a disk."""
    base = Content(
        (PoolTrack("next", "v2"), PoolTrack("stable", "v1"), PoolTrack("third", "v3", Track.STABLE, 100)),
        rollout="r2",
        rollout_state=RolloutState.COMPLETED,
    )
    (found,) = reconciled(document, base)
    assert found.is_final and found.is_taken_back
    content = wanted(base, Desired(), found, {**VERSIONS, "third": "v3"})
    assert content.stable.pool == "third" and content.stable.weight_percent == 100


@pytest.mark.parametrize("document", [baking(2, 50), transitions.promoting(baking(3, 100), "passed", 1005.0)])
def test_a_weight_that_no_snapshot_carries_is_not_raised_by_a_restored_document(
    document: RolloutDocument,
) -> None:
    """The stable pool is that of the document's start again, and the receivers have no rollout."""
    (found,) = reconciled(document, CALM)
    assert found.is_final and wanted(CALM, Desired(), found, VERSIONS).stable.pool == "stable"


@pytest.mark.parametrize("document", [pending(), baking(1, 10)])
def test_a_step_without_its_document_is_taken_back(document: RolloutDocument) -> None:
    """Redis lost the write of a step: the rollout goes back, from the step that receivers have."""
    (found,) = reconciled(document, content_of(baking(2, 50)))
    assert found.state is RolloutState.ROLLING_BACK and found.weight_percent == 0
    assert found.revision == document.revision + 1


@pytest.mark.parametrize("document", [pending(), baking(1, 10), baking(3, 100)])
@pytest.mark.parametrize("step", [3, 0, 99])
def test_a_promotion_without_its_document_goes_forward(document: RolloutDocument, step: int) -> None:
    """The old pool may be gone, so a promotion is completed. A receiver may tell any step."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    (found,) = reconciled(document, replace(content_of(promoted), step=step))
    assert found.state is RolloutState.PROMOTING and found.stable_pool == "next"


@pytest.mark.parametrize(
    "document", [pending(), baking(1, 10), transitions.promoting(baking(3, 100), "passed", 1005.0)]
)
def test_a_completed_rollout_without_its_last_document_stays_completed(document: RolloutDocument) -> None:
    """The old pool is closed and may be gone, so a lost write must not send all traffic to it."""
    promoting = transitions.promoting(baking(3, 100), "passed", 1005.0)
    completed = transitions.completed(promoting, "kept", 1006.0)
    (found,) = reconciled(document, wanted(content_of(promoting), Desired(), completed, VERSIONS))
    assert found.state is RolloutState.COMPLETED and found.stable_pool == "next"


@pytest.mark.parametrize("state", ["PENDING", "BAKING", "PROMOTING"])
def test_all_to_stable_without_a_control_plane_is_not_undone(state: str) -> None:
    """`snapshot stable --direct`: a later leader ends the rollout, and the weights stay. A promoted one stays promoted."""
    promoting = transitions.promoting(baking(3, 100), "passed", 1005.0)
    document = {"PENDING": pending(), "BAKING": baking(2, 50), "PROMOTING": promoting}[state]
    base = all_to_stable(content_of(document), 1)
    found = reconciled(document, base, frozenset(base.ended_rollouts))
    assert [each.is_taken_back for each in found] == ([] if state == "PROMOTING" else [True])
    after = wanted(base, Desired(), found[-1] if found else document, VERSIONS)
    assert after.stable == base.stable and not after.canary_percent


def test_a_rollout_that_a_receiver_calls_ended_is_taken_back() -> None:
    """A lost write cannot raise a condemned canary again."""
    (found,) = reconciled(baking(2, 50), None, frozenset({"r1"}))
    assert found.state is RolloutState.ROLLING_BACK
    assert reconciled(found, None, frozenset({"r1"})) == []


def test_of_two_running_rollouts_one_stays() -> None:
    """A lost write may leave two; one rollout runs at a time. The one that receivers carry stays."""
    older, later = baking(1, 10), changed(pending("r2"), revision=3)
    found = list(takeover.reconcile([older, later], None, frozenset(), 2000.0))
    assert [(each.id, each.state) for each in found] == [("r1", RolloutState.ROLLED_BACK)]
    found = list(takeover.reconcile([older, later], content_of(older), frozenset(), 2000.0))
    assert [(each.id, each.state) for each in found] == [("r2", RolloutState.ABORTED)]


def test_weights_without_any_document_are_an_orphan() -> None:
    """Its traffic goes to stable; a promotion, an end and a known rollout are none."""
    base = content_of(baking(2, 50))
    assert takeover.orphan([], base) == "r1"
    assert takeover.orphan(["r1"], base) == ""
    assert takeover.orphan([], CALM) == takeover.orphan([], None) == ""
    promoted = content_of(transitions.promoting(baking(3, 100), "passed", 1005.0))
    assert takeover.orphan([], promoted) == ""
    back = content_of(transitions.taken_back(baking(2, 50), "fails", 1005.0))
    assert takeover.orphan([], replace(back)) == ""
