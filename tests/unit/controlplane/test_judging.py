"""The judge of a rollout between leaders: its state survives in the document, in bounded size."""

from __future__ import annotations

from msgspec.structs import replace as changed

from controlplane.judging import SAVE_S, TEXT_BYTES_MAX, Judging
from controlplane.observing import batch_of
from controlplane.pools.registry import Boot
from controlplane.rollouts import document as documents
from controlplane.rollouts import verdict as verdicts
from controlplane.rollouts.judge.observation import CANARY, STABLE, Track
from controlplane.rollouts.verdict import VerdictKind
from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.unit.controlplane.test_takeover import baking

TRACKS: dict[str, Track] = {"stable": STABLE, "next": CANARY}


def batch(sequence: int, sessions: range, *, pool: str = "next", outcome: str = "ok") -> pb.ObservationBatch:
    """Return one end for each of `sessions`."""
    ends = [
        pb.RequestEnd(
            pool=pool,
            rollout="r1",
            session=number,
            outcome=outcome,
            ttft_s=0.05,
            prompt_tokens=100,
            computed_tokens=20,
            duration_s=0.2,
            decode_replica="d",
            prefill_replica="p",
            output_tokens=8,
            finish_reason="length",
        )
        for number in sessions
    ]
    counts = [pb.TrackCounts(pool=pool, started=len(ends), ended=len(ends))]
    return pb.ObservationBatch(sequence=sequence, ends=ends, counts=counts)


def judging_at(now_s: float) -> Judging:
    """Return a judge at step 1."""
    document = baking(1, 10)
    judging = Judging(document, now_s)
    judging.follow(document, now_s)
    return judging


def test_a_new_leader_continues_with_the_saved_state() -> None:
    """Samples and looks count on; a batch that both leaders get counts once."""
    first = judging_at(1000.0)
    for sequence, start in enumerate(range(0, 60, 10), 1):
        assert first.observe(batch(sequence, range(start, start + 10)), "frontend-0/a", TRACKS, 1001.0)
    first.verdict(1002.0)
    saved = first.save(1002.0)
    assert saved is not None and saved[1] == {"frontend-0/a": 6}
    second = Judging(changed(baking(1, 10), judge=saved[0]), 1003.0)
    assert second.step == 1
    assert second.observe(batch(6, range(50, 60)), "frontend-0/a", TRACKS, 1003.0)
    found = {each.track: each.sessions for each in second.verdict(1003.0).samples}
    assert found["canary"] == 60 and second.verdict(1003.0).looks == 1


def test_the_samples_begin_anew_with_each_weight() -> None:
    """The weight rises inside a step; the judge gets it from the document, a new leader too."""
    document = changed(baking(1, 10), weight_percent=5)
    judging = Judging(document, 1000.0)
    judging.follow(document, 1000.0)
    judging.observe(batch(1, range(10)), "f/a", TRACKS, 1001.0)
    saved = judging.save(1001.0)
    assert saved is not None
    risen = changed(document, weight_percent=10)
    for each in (judging, Judging(changed(document, judge=saved[0]), 1002.0)):
        assert {found.track: found.sessions for found in each.verdict(1002.0).samples}["canary"] == 10
        each.follow(document, 1002.0)
        assert {found.track: found.sessions for found in each.verdict(1002.0).samples}["canary"] == 10
        each.follow(risen, 1003.0)
        assert {found.track: found.sessions for found in each.verdict(1003.0).samples}["canary"] == 0


def test_a_verdict_tells_every_number_that_decided() -> None:
    """Units, samples of both arms, errors of clients, and what is reported and not judged; messages keep all of it."""
    judging = judging_at(1000.0)
    judging.observe(batch(1, range(60)), "f/a", TRACKS, 1001.0)
    judging.observe(batch(2, range(90), pool="stable"), "f/a", TRACKS, 1001.0)
    judging.observe(batch(3, range(60, 63), outcome="CLIENT_GONE"), "f/a", TRACKS, 1001.0)
    verdict = judging.verdict(1002.0)
    assert verdict.comparison == "stable" and verdict.is_weak
    gates = {gate.name: gate for gate in verdict.gates}
    assert (gates["errors"].unit, gates["errors"].bound) == ("% of sessions", 0.5)
    assert gates["errors"].comparison_samples == 90 and gates["errors"].canary_samples >= 60
    assert (gates["leak"].unit, gates["leak"].bound) == ("MiB", 64)
    assert all(gate.unit for gate in verdict.gates), [gate.name for gate in verdict.gates if not gate.unit]
    canary = next(each for each in verdict.samples if each.track == "canary")
    assert (canary.requests, canary.errors, canary.client_errors) == (63, 0, 3)
    assert canary.output_tokens_mean == 8.0 and canary.finish_reasons == {"length": 60}
    assert verdicts.of_message(verdicts.to_message(verdict)) == changed(verdict, needs=())


def test_the_state_is_saved_at_looks_and_every_few_seconds() -> None:
    """In between nothing is due, so that documents stay cheap to write."""
    judging = judging_at(1000.0)
    judging.observe(batch(1, range(10)), "f/a", TRACKS, 1000.0)
    judging.verdict(1000.0)
    assert judging.save(1000.0) is not None
    assert judging.save(1000.0 + SAVE_S / 2) is None
    assert judging.save(1000.0 + SAVE_S) is not None
    judging.observe(batch(2, range(10, 70)), "f/a", TRACKS, 1005.5)
    judging.verdict(1005.5)
    assert judging.save(1005.6) is not None
    assert judging.save(900.0) is not None  # the clock went back


def test_the_largest_state_fits_into_a_document() -> None:
    """Thousands of sessions in two tracks stay below the bound: the judge keeps fewer of them, and still counts all."""
    judging = judging_at(1000.0)
    for sequence in range(1, 25):
        sessions = range(sequence * 1000, sequence * 1000 + 1000)
        judging.observe(batch(2 * sequence - 1, sessions), "f/a", TRACKS, 1000.0 + sequence)
        judging.observe(batch(2 * sequence, sessions, pool="stable"), "f/a", TRACKS, 1000.0 + sequence)
    saved = judging.save(1020.0)
    assert saved is not None
    assert len(saved[0]) <= TEXT_BYTES_MAX
    assert documents.encode(changed(baking(1, 10), judge=saved[0]))
    found = {each.track: each.sessions for each in judging.verdict(1020.0).samples}
    assert 20_000 < found["canary"] < 28_000
    second = Judging(changed(baking(1, 10), judge=saved[0]), 1021.0)
    assert second.verdict(1021.0).looks == judging.verdict(1021.0).looks > 0


def test_an_unreadable_state_begins_anew() -> None:
    """Junk, another release's state and a bomb are no state."""
    for text in ("junk", "e30=", "{}"):
        judging = Judging(changed(baking(1, 10), judge=text), 1000.0)
        assert judging.step == 0


def test_a_batch_out_of_range_is_refused_whole() -> None:
    """The judge takes nothing of it, and the reason is kept for the operator."""
    judging = judging_at(1000.0)
    bad = batch(1, range(20))
    bad.ends[3].ttft_s = float("nan")
    assert not judging.observe(bad, "f/a", TRACKS, 1000.0)
    assert judging.refused_total == 1 and "ttft_s" in judging.last_refusal
    assert judging.verdict(1000.0).kind is not VerdictKind.PASS


def test_rows_of_other_rollouts_do_not_count() -> None:
    """A request that the rollout did not place says nothing of a version, and neither does one of an outside tenant."""
    message = batch(1, range(4))
    for row in message.ends[:2]:
        row.rollout = ""
    message.ends.append(pb.RequestEnd(pool="stable", session=8, outcome="DEADLINE", duration_s=1.0))
    message.ends.append(
        pb.RequestEnd(pool="stable", rollout="r1", session=9, outcome="DEADLINE", duration_s=1.0)
    )
    found = batch_of(message, "f/a", TRACKS, "r1", 1000.0)
    assert [(end.track, end.outcome) for end in found.ends] == [
        (CANARY, "ok"),
        (CANARY, "ok"),
        (STABLE, "client"),
    ]


def test_a_clock_that_steps_back_hides_nothing() -> None:
    """The requests after the step back count, also those of a new leader with a slower clock."""
    judging = judging_at(1000.0)
    judging.observe(batch(1, range(20)), "f/a", TRACKS, 1001.0)
    judging.observe(batch(2, range(20, 40)), "f/a", TRACKS, 401.0)
    saved = judging.save(402.0)
    assert saved is not None
    second = Judging(changed(baking(1, 10), judge=saved[0]), 10.0)
    assert second.observe(batch(3, range(40, 60)), "f/a", TRACKS, 11.0)
    found = {each.track: each.sessions for each in second.verdict(12.0).samples}
    assert found["canary"] == 60


def test_stable_is_observed_before_the_first_step() -> None:
    """A first step of 100 % is compared with the stable sessions of PREPARING, also by the next leader."""
    document = baking(1, 10)
    preparing = Judging(document, 1000.0)
    assert preparing.observe(batch(1, range(60), pool="stable"), "f/a", TRACKS, 1001.0)
    before = preparing.verdict(1002.0)
    assert before.kind is VerdictKind.NONE
    assert [(each.track, each.sessions) for each in before.samples] == [("stable", 60)]
    saved = preparing.save(1002.0)
    assert saved is not None
    second = Judging(changed(document, judge=saved[0]), 1003.0)
    settings = changed(document.settings, steps_percent=(100,))
    second.follow(changed(document, settings=settings), 1004.0)
    second.observe(batch(2, range(100, 160)), "f/a", TRACKS, 1005.0)
    gates = {each.name: each for each in second.verdict(1006.0).gates}
    assert gates["errors"].result == "passes"


def test_after_a_failure_no_step_begins() -> None:
    """An operator may have resumed another step meanwhile; the verdict stays."""
    judging = judging_at(1000.0)
    judging.boots([Boot("next", "d", 1000.0 + at) for at in range(3)], TRACKS)
    assert judging.verdict(1003.0).kind is VerdictKind.FAIL
    judging.follow(baking(2, 50), 1004.0)
    assert judging.step == 1
    assert judging.verdict(1005.0).kind is VerdictKind.FAIL
