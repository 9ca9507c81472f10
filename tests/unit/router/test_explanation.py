"""What is told of a placement: the chosen one first, what it was compared with, and why it won."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.explanation import why
from services.router.policy import Candidate, Placement
from tests.unit.router.desk import B, Desk, first


def candidate(name: str, queue_s: float, prefill_s: float, score: float, matched: int = 0) -> Candidate:
    return Candidate(name, matched, queue_s, prefill_s, score)


def placement(*candidates: Candidate, local: bool = False) -> Placement:
    first = candidates[0]
    return Placement(
        None if local else first.replica,
        first.replica if local else "decode-0",
        first.matched_blocks,
        first.prefill_s,
        first.queue_s + first.prefill_s,
        candidates,
    )


COLD = candidate("p1", 0.0, 0.1, 0.2)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (placement(COLD), "p1 is the only prefill replica that takes requests."),
        (
            placement(candidate("p0", 0.01, 0.02, 0.05, 40), COLD),
            (
                "p0 is ready first: 10.0 ms of queue, 20.0 ms of prefill with 40 blocks cached; "
                "next is p1: 0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached."
            ),
        ),
        (placement(COLD, candidate("p2", 0.0, 0.1, 0.2)), "p1 was drawn among equals: "),
        (
            placement(candidate("p0", 0.15, 0.02, 0.19, 40), COLD),
            (
                "p0 has more in cache: 150.0 ms of queue, 20.0 ms of prefill with 40 blocks cached. "
                "p1 would be ready 70.0 ms sooner"
            ),
        ),
        (
            placement(candidate("p0", 0.02, 0.1, 0.19), COLD),
            "p0 has the lowest score: 20.0 ms of queue, 100.0 ms of prefill with 0 blocks cached. p1 would be",
        ),
        (
            placement(candidate("decode-1", 0.0, 0.005, 0.005, 9), COLD, local=True),
            "decode-1 decodes and runs the prompt, too, in 5.0 ms: p1 would take 100.0 ms and a handoff.",
        ),
        (
            placement(candidate("decode-1", 0.0, 0.005, 0.005), local=True),
            "decode-1 decodes and runs the prompt, too: no prefill replica takes requests.",
        ),
    ],
)
def test_the_reason_names_what_decided(made: Placement, told: str) -> None:
    """Time, cache, recent work, chance, or that there was no choice."""
    assert why(made, waited_s=0.0, waited_for="").startswith(told)


def test_a_wait_is_told_with_what_it_was_for() -> None:
    """It was placed later than it came, and where it would have gone."""
    told = why(placement(COLD), waited_s=0.42, waited_for="p0 has work ahead")
    assert told.startswith("After 420.0 ms at the router (p0 has work ahead): p1 is")


def test_a_request_that_waited_is_explained_as_one_that_did_not() -> None:
    """The candidates are those of the moment it was placed, and the wait is told."""
    desk = Desk()
    desk.submit(tokens=4000)
    (row,) = desk.told().placements
    assert not row.reason and not row.candidates
    decode, reserved = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=reserved.slot)])
    slot = desk.submit(B, explain=True)
    assert not desk.told().placements
    (asked,) = desk.up("prefill-0").submits
    desk.now_s += 0.5
    desk.down("prefill-0", starts=[pb.Start(slot=asked.slot)])
    desk.down("prefill-0", first_tokens=[first(asked.slot)])
    (row,) = desk.told().placements
    assert row.slot == slot and row.queue_us >= 500_000
    assert [each.replica for each in row.candidates] == ["prefill-0"]
    assert row.reason.startswith(
        "After 500.0 ms at the router (prefill-0 has work ahead): prefill-0 is the only"
    )


def test_a_prompt_that_decode_runs_is_explained() -> None:
    """The decode replica comes first, whatever the scores; what prefill would have taken stands beside it."""
    desk = Desk(local=64)
    desk.submit(B, explain=True)
    (row,) = desk.told().placements
    assert not row.prefill_replica
    assert [each.replica for each in row.candidates] == [row.decode_replica, "prefill-0"]
    assert row.reason.startswith(f"{row.decode_replica} decodes and runs the prompt, too, in ")
