"""The documents of a control process: the highest revision counts, and lost ones are written again."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace as changed

from controlplane.library import DESIRED, Library, StoreRead, writing
from controlplane.rollouts import document as documents
from controlplane.rollouts import transitions
from controlplane.rollouts.document import DocumentError
from controlplane.snapshots import desired as desired_documents
from controlplane.snapshots.desired import CordonEntry, Desired
from tests.unit.controlplane.test_takeover import baking, pending


def read_of(*rollouts: documents.RolloutDocument, desired: Desired | None = None) -> StoreRead:
    """Return a read of Redis with these documents."""
    return StoreRead(
        {each.id: documents.encode(each) for each in rollouts},
        desired_documents.encode(desired) if desired is not None else None,
        None,
        1,
    )


def test_the_highest_revision_counts() -> None:
    """An older document in Redis never replaces a later one in memory."""
    library = Library()
    library.learn(read_of(baking(2, 50)), is_leader=True)
    library.learn(read_of(pending()), is_leader=True)
    found = library.rollout("r1")
    assert found is not None and found.step == 2


def test_a_follower_believes_redis_at_an_equal_revision() -> None:
    """Another leader may have written it after this process was deposed; a leader keeps its own."""
    for is_leader, step in ((True, 2), (False, 1)):
        library = Library()
        library.adopt(baking(2, 50))
        library.learn(read_of(baking(1, 10)), is_leader=is_leader)
        found = library.rollout("r1")
        assert found is not None and found.step == step


def test_lost_documents_are_written_again_from_the_revision_in_redis() -> None:
    """Redis lost one, has an old revision of another, and has the third."""
    library, kept = Library(), changed(pending("r3"), revision=4)
    library.adopt(baking(1, 10))
    library.adopt(kept)
    library.adopt(Desired(revision=2))
    read = read_of(kept)
    library.learn(read, is_leader=True)
    lost = library.unwritten(read)
    assert lost is not None and (lost.name, lost.replaces, lost.revision) == ("r1", 0, 9)
    read = read_of(kept, pending(), desired=Desired(revision=2))
    library.learn(read, is_leader=True)
    lost = library.unwritten(read)
    assert lost is not None and (lost.name, lost.replaces) == ("r1", 1)
    read = read_of(kept, baking(1, 10))
    library.learn(read, is_leader=True)
    lost = library.unwritten(read)
    assert lost is not None and (lost.kind.value, lost.replaces, lost.revision) == ("desired", 0, 2)


def test_an_unreadable_document_is_left_alone() -> None:
    """A later release may have written it. It is named, and forgotten once it is readable."""
    library = Library()
    library.adopt(pending())
    read = StoreRead({"r1": b"{}"}, b"junk", None, 1)
    library.learn(read, is_leader=True)
    assert library.unwritten(read) is None and set(library.problems) == {"r1", DESIRED}
    read = read_of(pending(), desired=Desired(revision=3))
    library.learn(read, is_leader=True)
    assert not library.problems and library.desired.revision == 3


def test_no_order_of_reads_goes_back() -> None:
    """Random reads with losses: revisions ascend, and a leader ends with Redis as it knows it."""
    for seed in range(100):
        rng, library = random.Random(seed), Library()
        revisions = {
            name: [changed(pending(name), revision=number) for number in range(1, 6)] for name in "ab"
        }
        last: dict[str, int] = {}
        for _ in range(30):
            chosen = [rng.choice(each) for each in revisions.values() if rng.random() < 0.7]
            read = read_of(*chosen)
            library.learn(read, is_leader=True)
            for document in library.rollouts:
                assert document.revision >= last.get(document.id, 0), f"seed={seed}"
                last[document.id] = document.revision
            stored = {each.id: each.revision for each in chosen}
            lost = library.unwritten(read)
            behind = {name for name, revision in last.items() if stored.get(name, 0) < revision}
            assert (lost is not None) == bool(behind), f"seed={seed}"
            assert lost is None or lost.name in behind


def test_cordons_that_no_process_could_read_are_not_written() -> None:
    """The bound of a document holds for all of them: a larger value counts as lost, and was written each second."""
    entry = CordonEntry(process_id="p" * 100, reason="r" * 200)
    with pytest.raises(DocumentError, match=r"document of cordons has .* up to 786432 are allowed"):
        writing(1, Desired(revision=1, cordons=(entry,) * 4096), 0)


def test_a_clock_that_went_back_never_makes_the_next_rollout_an_earlier_one() -> None:
    """The last rollout decides whether an operator's stable pool still counts; the lowest ids are removed first."""
    library = Library()
    assert library.start_s(2000.0) == 2000.0
    library.adopt(transitions.taken_back(pending("r1"), "aborted", 1001.0))
    start_s = library.start_s(500.0)
    later = pending("r2")
    library.adopt(changed(later, origin=changed(later.origin, started_s=start_s)))
    assert start_s > 1000.0 and library.current is not None and library.current.id == "r2"
