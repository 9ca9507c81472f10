"""The explanation of a placement: the chosen replica first, the compared candidates, and the reason."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.explanation import why
from services.router.placement.policy import (
    Candidate,
    DecodeCandidate,
    Dispatched,
    Finished,
    Hit,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaState,
    Started,
    Stored,
)
from tests.unit.router.desk import B, Desk, first

BLOCK = 10


def candidate(
    name: str, queue_s: float, prefill_s: float, score: float, matched: int = 0, **terms: float
) -> Candidate:
    return Candidate(name, matched, queue_s, prefill_s, score, **terms)


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


CLAIMS = (
    *(
        "random among equals",
        "ready first",
        "as soon",
        "sooner",
        "ahead of",
        "waiting requests",
        "requests that come",
    ),
    *("another router", "it holds", "more room", "no other compared", "runs the prompt"),
)
COLD = candidate("p1", 0.0, 0.1, 0.2)
NOBODY_WAITS = candidate("p1", 0.0, 0.1, 0.1)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (placement(COLD), "p1 is the only prefill replica that takes requests."),
        (
            placement(candidate("p0", 0.01, 0.02, 0.05, 40), NOBODY_WAITS),
            (
                "p0 should be ready first: 10.0 ms of queue, 20.0 ms of prefill with 40 blocks cached; "
                "next is p1: 0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached."
            ),
        ),
        (
            placement(candidate("p0", 0.01, 0.08, 0.09), COLD),
            (
                "p0 should be ready first: 10.0 ms of queue, 80.0 ms of prefill with 0 blocks cached; next is p1: "
                "0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached, and waiting requests would lose 100.0 ms more."
            ),
        ),
        (
            placement(candidate("p0", 0.0, 0.1, 0.1), candidate("p1", 0.0, 0.10001, 0.11, risk_s=0.009)),
            (
                "p0 has the lowest score: 0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached. p1 would be ready "
                "as soon (0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached), "
                "but the chance that another router has just sent it a prompt costs 9.0 ms more."
            ),
        ),
        (
            placement(
                candidate("p0", 0.0, 0.1, 0.11),
                candidate("p1", 0.0, 0.15, 0.15),
                candidate("p2", 0.0, 0.05, 0.2),
            ),
            "p0 has the lowest score: 0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached. p2 would be ready 50.0",
        ),
        (placement(COLD, candidate("p2", 0.0, 0.1, 0.2)), "p1 was chosen at random among equals: "),
        (
            placement(candidate("p0", 0.15, 0.02, 0.19, 40), COLD),
            (
                "p0 has more in cache: 150.0 ms of queue, 20.0 ms of prefill with 40 blocks cached. "
                "p1 would be ready 70.0 ms sooner"
            ),
        ),
        (
            placement(candidate("p0", 0.02, 0.1, 0.13), candidate("p1", 0.0, 0.1, 0.19, displaced_s=0.08)),
            (
                "p0 has the lowest score: 20.0 ms of queue, 100.0 ms of prefill with 0 blocks cached. p1 would be ready "
                "20.0 ms sooner (0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached), "
                "but requests that come to it for its cache would lose 80.0 ms more."
            ),
        ),
        (
            placement(
                candidate("p0", 0.05, 0.1, 0.15),
                candidate("p1", 0.0, 0.1, 0.17, displaced_s=0.04, risk_s=0.03),
            ),
            (
                "p0 has the lowest score: 50.0 ms of queue, 100.0 ms of prefill with 0 blocks cached. p1 would be ready "
                "50.0 ms sooner (0.0 ms of queue, 100.0 ms of prefill with 0 blocks cached), "
                "but requests that come to it for its cache would lose 40.0 ms more "
                "and the chance that another router has just sent it a prompt costs 30.0 ms more."
            ),
        ),
        (
            placement(
                candidate("decode-1", 0.0, 0.0102, 0.02, 9, decode_s=0.0098),
                candidate("p1", 0.0, 0.0102, 0.0306, decode_s=0.0204),
                local=True,
            ),
            (
                "decode-1 decodes and runs the prompt itself, with 9 blocks cached: 20.0 ms with the cost of decode, "
                "against 30.6 ms with a prefill on p1 and a handoff."
            ),
        ),
        (
            placement(candidate("decode-1", 0.0, 0.005, 0.005), local=True),
            "decode-1 decodes and runs the prompt itself: no prefill replica takes requests.",
        ),
    ],
)
def test_the_reason_names_what_decided(made: Placement, told: str) -> None:
    """Time, cache, other requests, chance, or that there was no choice."""
    assert why(made, waited_s=0.0, waited_for="").startswith(told)


@pytest.mark.parametrize(
    ("decodes", "told"),
    [
        ([("d0", 0, 0.2, 0.1)], "d0 decodes: no other compared decode replica has room."),
        ([("d0", 0, 0.2, 0.1), ("d1", 0, 0.3, 0.1)], "d0 decodes: it has more room than d1."),
        ([("d0", 9, 0.2, 0.0), ("d1", 2, 0.21, 0.1)], "d0 decodes: it holds 9 blocks of the prompt, d1 2."),
        ([("d0", 0, 0.2, 0.1), ("d1", 0, 0.2, 0.1)], "d0 decodes, chosen at random among equals."),
        ([("d0", 0, 0.3, 0.1), ("d1", 0, 0.2, 0.1, 0.5)], "d0 decodes: d1 is in slow start."),
    ],
)
def test_the_decode_replica_is_explained(decodes: list[tuple[Any, ...]], told: str) -> None:
    """The table has the prefill side alone."""
    made = placement(COLD)._replace(decode_candidates=tuple(DecodeCandidate(*one) for one in decodes))
    assert why(made, waited_s=0.0, waited_for="").endswith(f"requests. {told}")


def history(seed: int) -> Iterator[Placement]:
    """Place prompts of some conversations, long and short, with another router beside this one or none."""
    rng = random.Random(seed)
    prefill = [ReplicaState(f"p{index}", 4000) for index in range(rng.choice((2, 4)))]
    decode = [ReplicaState(f"d{index}", 4000) for index in range(rng.choice((1, 3)))]
    policy = CostPolicy(
        "r0",
        LocalPrefixIndex(),
        random.Random(seed),
        block_tokens=BLOCK,
        dispatch_ahead_s=1000.0,
        local_prefill_tokens_max=rng.choice((0, 300)),
    )
    for one in (*prefill, *decode):
        policy.local_index.add(one.name)
    now_s, running, has_others = 0.0, list[Dispatched](), rng.random() < 0.5
    for index in range(200):
        now_s += rng.expovariate(3 * len(prefill))
        while running and rng.random() < 0.6:
            ended = running.pop(rng.randrange(len(running)))
            policy.observe(Started(ended.router, ended.request_id, now_s))
            hit = Hit(0, ended.token_count, 0, rng.uniform(0.01, 0.3))
            policy.observe(Finished(ended.router, ended.request_id, now_s, hit))
            if rng.random() < 0.5:
                policy.observe(Stored(rng.choice((*prefill, *decode)).name, ended.hashes))
        for one in decode:
            one.block_reserved, one.running_requests = rng.randint(0, 2000), rng.randint(0, 9)
        start = rng.randrange(9) * 1000
        hashes = tuple(range(start, start + rng.choice((1, 10, 90))))
        if has_others and rng.random() < 0.5:
            name = rng.choice(prefill).name
            other = Dispatched(
                "r1", f"x{index}", name, hashes, 0.1, now_s - 0.05, now_s + 3, received_s=now_s
            )
            policy.observe(other)
        request = PlacementRequest(f"{index}", hashes, len(hashes) * BLOCK + 5, 50, explain=True)
        answer = policy.place(request, PoolView(prefill, decode, rng.choice((0, 3))), now_s)
        assert isinstance(answer, Placement)
        yield answer
        sent = answer.prefill or answer.decode, hashes, answer.prefill_s, now_s, now_s + 1e6
        told = Dispatched("r0", request.request_id, *sent, token_count=request.token_count)
        policy.observe(told)
        running.append(told)


def test_claims_are_true_after_any_history() -> None:
    """Claims about the first, the time difference and the losses are true, and the chosen replica has the least score."""
    seen = set[str]()
    for made in (made for seed in range(20) for made in history(seed)):
        told = why(made, waited_s=0.0, waited_for="")
        chosen, *others = made.candidates
        ready_ms = {one.replica: (one.queue_s + one.prefill_s) * 1e3 for one in made.candidates}
        assert all(chosen.score <= one.score * (1 + 1e-9) for one in others), told
        for one in made.candidates:
            shown_s = one.queue_s + one.prefill_s + one.displaced_s + one.risk_s + one.decode_s
            assert one.score >= shown_s * (1 - 1e-9) and min(one.displaced_s, one.risk_s) >= 0, one
        if "should be ready first" in told:
            assert all(ready_ms[one.replica] > ready_ms[chosen.replica] for one in others), told
        if found := re.search(r"(p\d) would be ready (as soon|([\d.]+) ms sooner)", told):
            sooner_ms = ready_ms[chosen.replica] - ready_ms[found[1]]
            assert sooner_ms == pytest.approx(float(found[3] or 0.0), abs=0.11), told
            lost_ms = sum(map(float, re.findall(r"([-\d.]+) ms more", told)))
            assert lost_ms > sooner_ms - 0.2, told
        for claimed in re.findall(r"(?:lose|costs) ([-\d.]+) ms more", told):
            assert float(claimed) > 0, told
        if made.prefill is None:
            assert not made.decode_candidates and chosen.replica == made.decode
        else:
            decode, *beside = made.decode_candidates
            assert decode.replica == made.decode
            assert all(decode.full_s + decode.move_s <= one.full_s + one.move_s + 1e-12 for one in beside)
            held = max((one.matched_blocks for one in beside), default=0)
            assert "it holds" not in told or decode.matched_blocks > 0, (told, held)
        seen |= {word for word in CLAIMS if word in told}
    assert seen == {*CLAIMS}


def test_a_wait_is_explained() -> None:
    """The text tells the wait and its reason."""
    told = why(placement(COLD), waited_s=0.42, waited_for="p0 has work ahead")
    assert told.startswith("After 420.0 ms at the router (p0 has work ahead): p1 is")


def test_a_request_that_waited_is_explained_too() -> None:
    """The candidates are those of the moment of placement, and the wait is reported."""
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
    """The decode replica comes first, whatever the scores. The pairs with prefill replicas are listed beside it."""
    desk = Desk(local=64)
    desk.submit(B, explain=True)
    (row,) = desk.told().placements
    assert not row.prefill_replica
    assert [each.replica for each in row.candidates] == [row.decode_replica, "prefill-0"]
    assert row.reason.startswith(
        f"{row.decode_replica} decodes and runs the prompt itself, with 0 blocks cached"
    )
    chosen, other = row.candidates
    assert chosen.score < other.score
    for one in row.candidates:
        assert one.score * 1e6 == pytest.approx(one.queue_us + one.prefill_us + one.decode_us, abs=3)
