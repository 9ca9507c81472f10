"""Observations for the judge of rollouts: exact rows, conserved counts, bounds, and batches until they are confirmed."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from controlplane.observing import batch_of
from controlplane.rollouts.judge.observation import Batch
from controlplane.rollouts.judge.refusal import check_batch
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.snapshot.assignment import session_hash
from kvmesh.snapshot.content import Content, PoolTrack, RolloutState, Track
from services.frontend.requests import observations
from services.frontend.requests.attempts import Attempt, waited_s
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.observations import (
    BATCH_S,
    ENDS_MAX,
    KEPT_S,
    OPEN_MAX,
    TIMES_MAX,
    Observations,
    gaps,
)
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from tests.unit.frontend.fake_mesh import DETACHED_S, FakeMesh
from tests.unit.frontend.test_pools import CONTENT, POOLS, begin, finish, generated, mesh_of, routers_of

STEADY = Content((PoolTrack("stable", "v1", Track.STABLE, 100), PoolTrack("canary", "v2")))


def drained(mesh: FakeMesh) -> pb.ObservationBatch:
    batch = mesh.core.observations.drain(mesh.now_s)
    assert batch is not None
    return batch


def count(batch: pb.ObservationBatch, pool: str) -> pb.TrackCounts:
    (found,) = [each for each in batch.counts if each.pool == pool]
    return found


def test_a_request_that_ended_has_one_exact_row() -> None:
    """Every figure of the row is the one that the client and the router saw."""
    mesh = mesh_of()
    client = begin(mesh, "canary", session_id="s1")
    began_s = mesh.now_s
    mesh.settle(3)
    mesh.advance(0.5)
    mesh.settle(2)
    first_s = mesh.now_s
    ended = False
    while not ended:
        mesh.advance(0.1)
        mesh.settle()
        client.read(mesh.now_s)
        ended = client.is_done
    ended_s = client.request.ended_s
    mesh.advance(0.25)
    batch = drained(mesh)
    (row,) = batch.ends
    assert (row.pool, row.rollout, row.session) == ("canary", "r1", session_hash("", "s1"))
    assert (row.outcome, row.finish_reason) == ("ok", "length")
    assert row.ttft_s == pytest.approx(first_s - began_s)
    assert row.duration_s == pytest.approx(ended_s - began_s)
    assert (row.prompt_tokens, row.computed_tokens) == (client.spec.prompt_tokens, client.spec.prompt_tokens)
    assert row.output_tokens == 60 and row.gap_median_s == pytest.approx(0.1)
    assert row.gap_p95_s == pytest.approx(0.1)
    assert (row.prefill_replica, row.decode_replica) == ("prefill-0", "decode-0")
    assert abs(row.age_ms - 1000 * (mesh.now_s - ended_s)) <= 1 and not row.failed_attempts
    found = count(batch, "canary")
    assert (found.started, found.ended, found.open, found.dropped, found.diverted) == (1, 1, 0, 0, 0)
    assert batch.sequence == 1 and batch.age_ms == 0


def test_failed_attempts_that_a_retry_hid_are_told_with_their_replica() -> None:
    """The client sees one good answer; the row has the two attempts that failed, with fault, replica and time."""
    mesh = mesh_of()
    client = begin(mesh, "stable")
    client.request.is_bound = True
    failed_s = []
    for code in (attach.Failure.CODE_ENGINE_ERROR, attach.Failure.CODE_STALLED):
        while not (mesh.runs and mesh.runs[0].stage == "started"):
            mesh.settle()
            mesh.advance(0.05)
        mesh.fail(mesh.runs[0], code)
        failed_s.append(mesh.now_s)
        mesh.settle()
    assert finish(mesh, client) == "LENGTH"
    ages_s = [client.request.ended_s - at_s for at_s in failed_s]
    (row,) = drained(mesh).ends
    assert [each.age_ms / 1000 for each in row.failed_attempts] == pytest.approx(ages_s, abs=0.2)
    assert ages_s[0] > ages_s[1] > 1.0  # the requests of one death end at different times, and fail at one
    told = [(each.fault, each.replica) for each in row.failed_attempts]
    assert row.outcome == "ok" and told == [("ENGINE_ERROR", "decode-0"), ("STALLED", "decode-0")]


def test_an_error_is_named_by_its_reason() -> None:
    """A request that ended without a token has no first-token time and no finish reason."""
    mesh = mesh_of()
    client = begin(mesh, "canary")
    client.request.is_bound = True
    mesh.cut(routers_of(mesh, "canary")[0])
    assert finish(mesh, client) == "STALE_SNAPSHOT"
    (row,) = drained(mesh).ends
    assert (row.outcome, row.finish_reason) == ("STALE_SNAPSHOT", "") and not row.HasField("ttft_s")
    assert [each.fault for each in row.failed_attempts] == ["ROUTER_LOST"]


def test_a_move_ends_the_request_in_the_pool_that_it_left() -> None:
    """The dead canary's fault is charged to the canary; the row of stable is clean and of no rollout."""
    mesh = mesh_of()
    client = begin(mesh, "canary")
    mesh.settle()
    mesh.cut(routers_of(mesh, "canary")[0])
    assert finish(mesh, client) == "LENGTH"
    batch = drained(mesh)
    left, served = batch.ends
    assert (left.pool, left.rollout, left.outcome) == ("canary", "r1", "NO_ROUTER")
    assert [each.fault for each in left.failed_attempts] == ["ROUTER_LOST"]
    assert (served.pool, served.rollout, served.outcome) == ("stable", "", "ok")
    assert not served.failed_attempts
    assert (count(batch, "canary").started, count(batch, "canary").ended) == (1, 1)
    assert (count(batch, "canary").diverted, count(batch, "stable").started) == (1, 1)


def test_an_idle_frontend_tells_nothing_unless_a_rollout_runs() -> None:
    """The control plane hears of the last request's end, of each diverted one, and each second during a rollout."""
    mesh = mesh_of(STEADY)
    observations, sequences = mesh.core.observations, []

    def told() -> bool:
        mesh.advance(1.0)
        batch = observations.drain(mesh.now_s)
        sequences.extend([] if batch is None else [batch.sequence])
        return batch is not None

    assert not told()
    client = begin(mesh, "stable")
    assert told() and told()
    finish(mesh, client)
    batch = drained(mesh)
    sequences.append(batch.sequence)
    assert (count(batch, "stable").ended, count(batch, "stable").open) == (1, 0)
    assert not told() and not told()
    observations.on_diverted("canary")
    assert told() and not told()
    observations.take_rollout("r1")
    assert told() and told()
    observations.take_rollout("")
    assert not told() and sequences == list(range(1, len(sequences) + 1))


def test_open_and_silent_requests_are_reported() -> None:
    """A request without a token for 1 s has a row, and after 10 s it counts; one that flows has none."""
    mesh = mesh_of()
    for router in routers_of(mesh, "canary"):
        router.is_frozen = True
    begin(mesh, "canary", 1, session_id="s1")
    flowing = begin(mesh, "stable", 2)
    generated(mesh, flowing, 3)
    mesh.advance(0.99)
    assert not drained(mesh).open
    mesh.advance(0.5)
    mesh.settle()
    mesh.advance(0.5)
    (row,) = drained(mesh).open
    assert (row.pool, row.rollout, row.session) == ("canary", "r1", session_hash("", "s1"))
    assert row.age_s == row.silent_s == pytest.approx(1.99) and not row.has_first_token
    assert row.queue_s == pytest.approx(row.age_s)  # no replica has it
    mesh.advance(8.1)
    batch = drained(mesh)
    assert count(batch, "canary").open == count(batch, "stable").open == 1
    stream = next(row for row in batch.open if row.pool == "stable")
    assert stream.has_first_token and stream.silent_s == pytest.approx(8.6)
    assert stream.queue_s == 0.0


def test_time_in_queues_ends_when_an_engine_has_the_attempt() -> None:
    """Until then it grows. A failed attempt that no engine had counts whole, and one behind the first token not at all."""
    attempt = attempt_of(sent_s=10.0)
    assert waited_s([attempt], 12.0) == pytest.approx(2.0)
    attempt.placement, attempt.last_seen_s = attach.Placement(queue_us=2_500_000), 12.5
    assert waited_s([attempt], 13.0) == pytest.approx(3.0)
    attempt.placement = None  # the replica refused it
    assert waited_s([attempt], 14.0) == pytest.approx(4.0)
    attempt.placement, attempt.is_started = attach.Placement(queue_us=4_500_000), True
    attempt.replica_queue_us = 700_000
    assert waited_s([attempt], 20.0) == pytest.approx(5.2)
    lost = attempt_of(sent_s=3.0, fault="ROUTER_LOST")
    assert waited_s([lost, attempt], 20.0) == pytest.approx(12.2)
    attempt.has_tokens = True
    assert waited_s([lost, attempt, attempt_of(sent_s=21.0)], 30.0) == pytest.approx(12.2)


def attempt_of(sent_s: float, fault: str = "") -> Attempt:
    return Attempt(
        1, inference.AttemptExplanation.CAUSE_FIRST, 0, 100, "router-0", last_seen_s=sent_s, fault=fault
    )


def test_without_a_rollout_there_are_counts_alone() -> None:
    """No row, no kept batch and no recorded time, whatever happens; requests of that time have no row later either."""
    mesh = mesh_of(STEADY)
    before = begin(mesh, "stable", 1, rollout="", max_output_tokens=2)
    after = begin(mesh, "stable", 2, rollout="")
    assert before.request.note_token_s is None
    assert finish(mesh, before) == "LENGTH"
    batch = drained(mesh)
    assert not batch.ends and not batch.open and count(batch, "stable").started == 2
    assert not mesh.core.observations._batches
    mesh.core.take_snapshot(CONTENT)
    assert finish(mesh, after) == "LENGTH"
    mesh.advance(1.0)
    batch = drained(mesh)
    assert not batch.ends and count(batch, "stable").ended == 1


def test_batches_are_kept_until_confirmed_and_sent_again_to_the_next_leader() -> None:
    """Equal bytes but for their age. A confirmed batch never comes again; an unconfirmed one ends after 5 minutes."""
    mesh = mesh_of()
    sent = []
    for number in range(4):
        assert finish(mesh, begin(mesh, "canary", number)) == "LENGTH"
        mesh.advance(1.0)
        sent.append(pb.ObservationBatch.FromString(drained(mesh).SerializeToString()))
    assert mesh.core.observations.drain(mesh.now_s) is None
    mesh.core.observations.confirm(2)
    assert mesh.core.observations.kept_rows == 2
    mesh.core.observations.resend()
    for before in sent[2:]:
        again = drained(mesh)
        assert again.sequence == before.sequence and again.age_ms >= before.age_ms
        assert list(again.ends) == list(before.ends) and list(again.counts) == list(before.counts)
    mesh.advance(60.0)
    assert drained(mesh).sequence == 5  # an outage of Redis at the leader holds no news back
    mesh.advance(KEPT_S)
    batch = drained(mesh)
    assert batch.sequence == 6 and not batch.ends and count(batch, "canary").dropped == 2
    assert mesh.core.observations.dropped_total == 2 and mesh.core.observations.kept_rows == 0


def test_rows_are_bounded_and_what_is_beyond_counts_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no leader asks, rows stop at the bound; then batches of at most ENDS_MAX carry them, and no count is lost."""
    monkeypatch.setattr(observations, "KEPT_MAX", 50)
    monkeypatch.setattr(observations, "ENDS_MAX", 20)
    mesh = mesh_of()
    for number in range(70):
        client = begin(mesh, "canary", number)
        mesh.core.leave(client.request, mesh.now_s)
    assert mesh.core.observations.kept_rows == 50
    rows, counts = 0, Counter[str]()
    for _ in range(4):
        mesh.advance(1.0)
        batch = drained(mesh)
        assert len(batch.ends) <= 20
        rows += len(batch.ends)
        for each in batch.counts:
            counts.update(started=each.started, ended=each.ended, dropped=each.dropped)
        assert mesh.core.observations.kept_rows <= 50
    assert rows == 50 and counts == {"started": 70, "ended": 50, "dropped": 20}


def test_open_rows_are_bounded_by_pool() -> None:
    """A stable pool with many silent requests does not crowd out the canary's."""
    core = FrontendCore(
        Limits(4, DETACHED_S, 16), limit=400, retries=RetryBudget(0.0, 3.0, 0.0), jitter=lambda: 0.5
    )
    core.take_snapshot(CONTENT)
    mesh = FakeMesh(core, random.Random(0), 1, POOLS)
    for number in range(OPEN_MAX + 50):
        begin(mesh, "stable", number)
    begin(mesh, "canary", 999)
    mesh.advance(2.0)
    found = Counter(row.pool for row in drained(mesh).open)
    assert found == {"stable": OPEN_MAX, "canary": 1}


def test_gaps_are_those_of_the_last_tokens() -> None:
    """Median and 95th percentile against a sorted list of the last gaps."""
    for seed in range(200):
        draw = random.Random(seed)
        times, now_s = [], 1000.0
        for _ in range(draw.randint(3, 2 * TIMES_MAX)):
            now_s += draw.choice([0.01, 0.02, 0.5])
            times.append(now_s)
        kept = deque(times, maxlen=TIMES_MAX)
        every = sorted(after - before for before, after in pairwise(times[-TIMES_MAX:]))
        assert gaps(kept) == (every[len(every) // 2], every[min(len(every) - 1, len(every) * 95 // 100)])


def test_a_short_request_and_a_resumed_one_have_no_times_that_they_cannot_have() -> None:
    """Fewer than two gaps: no gaps. A resumed request: no first-token time, and its own tokens alone."""
    mesh = mesh_of()
    whole = begin(mesh, "stable", 1)
    assert finish(mesh, whole) == "LENGTH"
    fields: dict[str, Any] = {"is_resumed": True, "attempt_base": 256, "received_ids": tuple(whole.ids[:50])}
    assert finish(mesh, begin(mesh, "stable", 2, rollout="", **fields)) == "LENGTH"
    assert finish(mesh, begin(mesh, "stable", 3, max_output_tokens=2)) == "LENGTH"
    _, resumed, short = drained(mesh).ends
    assert resumed.output_tokens == 10 and not resumed.HasField("ttft_s") and resumed.rollout == ""
    assert not short.HasField("gap_median_s") and short.output_tokens == 2


def test_a_batch_takes_at_least_its_time_and_fits_a_message() -> None:
    """A second call at once gets nothing. A full batch stays below gRPC's 4 MB."""
    found = Observations("b")
    found.take_rollout("r1")
    assert found.drain(10.0) is not None and found.drain(10.0 + BATCH_S / 2) is None
    row = pb.RequestEnd(
        pool="p" * 64,
        rollout="r" * 32,
        session=1 << 63,
        outcome="ATTEMPTS_EXHAUSTED",
        ttft_s=1.0,
        queue_s=1.0,
        prompt_tokens=1 << 20,
        computed_tokens=1 << 20,
        gap_median_s=1.0,
        gap_p95_s=1.0,
        running_requests=999,
        output_tokens=9999,
        finish_reason="stop_string",
        prefill_replica="p" * 64,
        decode_replica="d" * 64,
        age_ms=1000,
        duration_s=1.0,
        failed_attempts=[pb.FailedAttempt(fault="REPLICA_LOST", replica="d" * 64)] * 4,
    )
    assert ENDS_MAX * row.ByteSize() < 3_500_000


def judged(batch: pb.ObservationBatch) -> Batch:
    """Return the judge's batch; its checks have passed."""
    found = batch_of(batch, "f", {"stable": "stable", "canary": "canary", "baseline": "baseline"}, "r1", 1e9)
    check_batch(found)
    return found


def test_no_batch_of_an_outage_is_refused_by_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch counts the ends of its own rows, with and without drops: the judge takes all of them."""
    monkeypatch.setattr(observations, "KEPT_MAX", 50)
    monkeypatch.setattr(observations, "ENDS_MAX", 20)
    for number, kept in ((45, 45), (70, 50)):
        mesh = mesh_of()
        for each in range(number):
            mesh.core.leave(begin(mesh, "canary", each).request, mesh.now_s)
        ended = 0
        for _ in range(4):
            mesh.advance(1.0)
            batch = drained(mesh)
            judged(batch)
            assert sum(each.ended for each in batch.counts) == len(batch.ends)
            ended += len(batch.ends)
        assert ended == kept


def test_a_request_without_a_prefill_has_no_computed_tokens() -> None:
    """A placed request that ended before its first token is in no stratum of requests from the cache."""
    mesh = mesh_of()
    placed, whole = begin(mesh, "canary", 1), begin(mesh, "canary", 2)
    while not (mesh.runs and mesh.runs[0].stage == "started"):
        mesh.settle()
        mesh.advance(0.05)
    mesh.core.leave(placed.request, mesh.now_s)
    assert finish(mesh, whole) == "LENGTH"
    batch = drained(mesh)
    row, computed = batch.ends
    assert row.prefill_replica and not row.HasField("computed_tokens")
    assert computed.computed_tokens == whole.spec.prompt_tokens
    assert [each.computed_tokens for each in judged(batch).ends] == [None, whole.spec.prompt_tokens]


@pytest.mark.parametrize("state", [state for state in RolloutState if state.is_final])
def test_a_rollout_that_is_over_has_no_rows(state: RolloutState) -> None:
    """The id of the last rollout stays in the snapshot; no row is recorded for it."""
    mesh = mesh_of(replace(STEADY, rollout="r1", rollout_state=state))
    assert finish(mesh, begin(mesh, "stable", rollout="")) == "LENGTH"
    batch = drained(mesh)
    assert not batch.ends and count(batch, "stable").ended == 1
    assert not mesh.core.observations._batches
