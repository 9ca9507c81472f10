"""The wanted content, and the checks before an operator's change of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.rollouts import transitions
from controlplane.snapshots.desired import CordonEntry, Desired
from controlplane.snapshots.publication import is_all_to_stable, objections, settled, wanted
from controlplane.snapshots.publisher import Publisher
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.content import ENDED_MAX, Cordon, RolloutState, Track
from kvmesh.snapshot.fence import Applied, Fence, Rejected
from kvmesh.snapshot.published import NO_NAME, Term, publish
from tests.unit.controlplane.test_takeover import CALM, VERSIONS, baking, content_of

PROMOTED = transitions.promoting(baking(3, 100), "passed", 1005.0)
BACK = transitions.taken_back(baking(2, 50), "fails", 1005.0)


def test_every_wanted_content_is_valid_and_names_ended_rollouts() -> None:
    """Whatever the rollout does, receivers may apply the content; a rollout that was taken back is named."""
    for document in (None, baking(1, 10), PROMOTED, BACK, transitions.rolled_back(BACK, "empty", 1006.0)):
        content = wanted(content_of(baking(2, 50)), Desired(), document, VERSIONS)
        contents.check(content)
        assert ("r1" in content.ended_rollouts) == (document is not None and document.is_taken_back)


def test_a_promotion_without_its_document_still_names_its_rollout() -> None:
    """A leader that lost the document cannot know of an undo: a receiver that does refuses the promotion."""
    kept = wanted(content_of(PROMOTED), Desired(), None, VERSIONS)
    assert (kept.stable.pool, kept.rollout, kept.rollout_state) == ("next", "r1", RolloutState.PROMOTING)
    assert wanted(kept, Desired(), None, VERSIONS) == kept
    fence = Fence()
    fence.remember(["r1"])
    assert isinstance(fence.offer(publish(Term(9, "c"), 1, kept)), Rejected)
    by_hand = wanted(kept, Desired().with_stable("stable", "", kept.stable_revision), None, VERSIONS)
    assert (by_hand.stable.pool, by_hand.rollout) == ("stable", "")


@pytest.mark.parametrize(
    ("pool", "stable"), [("stable", "stable"), ("", "next"), ("gone", "next"), ("next", "next")]
)
def test_an_undone_promotion_without_its_document_is_followed_by_all(pool: str, stable: str) -> None:
    """Once the leader hears of the undo, no receiver refuses: the pool behind the undo is stable, if it is known."""
    content = wanted(content_of(PROMOTED), Desired(), None, VERSIONS, {"r1": pool})
    contents.check(content)
    assert (content.stable.pool, content.rollout, content.ended_rollouts) == (stable, "", ("r1",))
    for known in ((), ("r1",)):
        fence = Fence()
        fence.remember(known)
        assert isinstance(fence.offer(publish(Term(9, "c"), 1, content)), Applied)
    assert is_all_to_stable(content_of(PROMOTED), content)
    again = wanted(content, Desired(), None, VERSIONS, {"r1": pool})
    assert again.pools == content.pools


def test_an_operators_stable_pool_counts_until_the_next_rollout() -> None:
    """A later rollout decides anew."""
    done = transitions.completed(PROMOTED, "kept", 1007.0)
    assert wanted(CALM, Desired().with_stable("next", "r0", 0), None, VERSIONS).stable.pool == "stable"
    assert wanted(CALM, Desired().with_stable("next", "", 0), None, VERSIONS).stable.pool == "next"
    back = Desired().with_stable("stable", "r1", 0)
    assert wanted(content_of(done), back, done, VERSIONS).stable.pool == "stable"


def test_an_operators_stable_pool_counts_once() -> None:
    """A snapshot that follows the command keeps its number. Later decisions stand, also if their documents are lost."""
    command = Desired().with_stable("next", "", 0)
    after = wanted(CALM, command, None, VERSIONS)
    assert (after.stable.pool, after.stable_revision) == ("next", command.revision)
    assert contents.decode(contents.encode(after)) == after
    assert wanted(after, command, None, VERSIONS) == after
    later = replace(after, pools=CALM.pools)  # for example `snapshot stable --direct`
    assert wanted(later, command, None, VERSIONS).stable.pool == "stable"
    done = transitions.completed(PROMOTED, "kept", 1007.0)
    unfollowed = Desired().with_stable(
        "stable", "r1", 0
    )  # its leader died, and the next one lacks r1's document
    between = wanted(wanted(content_of(PROMOTED), Desired(), done, VERSIONS), unfollowed, None, VERSIONS)
    assert (between.stable.pool, between.stable_revision) == ("next", 0)
    assert wanted(between, unfollowed, done, VERSIONS).stable.pool == "stable"
    again = Desired().with_stable("next", "", later.stable_revision)  # the first command's document is lost
    assert wanted(later, again, None, VERSIONS).stable.pool == "next"


def test_cordons_and_ended_rollouts_are_carried() -> None:
    """The latest sixteen ended rollouts stay, whoever named them."""
    desired = Desired(ended_rollouts=("a",)).cordoned(CordonEntry(process_id="decode-0", draining=True))
    base = replace(CALM, ended_rollouts=tuple(f"r{number}" for number in range(ENDED_MAX)))
    content = wanted(base, desired, None, VERSIONS, {"z": ""})
    assert content.cordons == (Cordon("decode-0", is_draining=True),)
    assert len(content.ended_rollouts) == ENDED_MAX and content.ended_rollouts[-1] == "a"
    assert desired.uncordoned("decode-0").cordons == ()


def test_only_all_to_stable_is_safe_without_redis() -> None:
    """Weight 0 and an undo are; a smaller weight, and a new stable pool, are not."""
    base = content_of(baking(2, 50))
    assert is_all_to_stable(base, content_of(BACK))
    assert not is_all_to_stable(base, content_of(baking(2, 40)))
    assert not is_all_to_stable(base, content_of(PROMOTED))
    undone = transitions.taken_back(PROMOTED, "undo", 1008.0)
    assert is_all_to_stable(content_of(PROMOTED), wanted(content_of(PROMOTED), Desired(), undone, VERSIONS))


def test_large_changes_need_force() -> None:
    """More than 25 points, or an emptied pool, is named with its figures."""
    base = content_of(baking(2, 50))
    assert objections(base, content_of(BACK))[0].startswith("the change moves 50 points")
    assert 'empties the pool "next", which has 50 percent' in objections(base, content_of(BACK))[1]
    assert objections(CALM, content_of(baking(1, 10))) == []


def test_a_pool_that_left_the_configuration_is_forgotten_unless_it_serves() -> None:
    """An idle pool goes, the stable one stays."""
    assert [pool.pool for pool in settled(CALM, {"stable": "v1"}).pools] == ["stable"]
    assert {pool.pool for pool in settled(CALM, {"next": "v3"}).pools} == {"next", "stable"}
    assert settled(CALM, {"next": "v3"}).stable.track is Track.STABLE


def test_the_publisher_names_the_first_snapshot_of_a_position() -> None:
    """A cordon in between needs no new acknowledgement of the weight; a new term does."""
    publisher, document = Publisher(CALM), baking(1, 10)
    first = publisher.publish(Term(1, "c"), content_of(document), 0.0, "", "")
    publisher.carry(document)
    publisher.publish(Term(1, "c"), replace(content_of(document), cordons=(Cordon("x"),)), 0.0, "", "")
    publisher.carry(document)
    assert publisher.carrier(document) == first.name
    assert publisher.carrier(baking(2, 50)) == NO_NAME
    publisher.begin_term()
    assert publisher.carrier(document) == NO_NAME and publisher.content.canary_percent == 10
