"""Turns the observations of frontends into those of the judge. Pure.

A row names the pool and the rollout that chose it. A row of another rollout, or of none, does not count. Its request began
before the rollout, was diverted, or is of a tenant that takes no part in the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from controlplane.rollouts.judge.observation import (
    BASELINE,
    CANARY,
    CLIENT,
    OK,
    STABLE,
    Batch,
    FailedAttempt,
    OpenRequest,
    RequestEnd,
    Track,
    TrackCounts,
)
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.errors import TABLE
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.content import Track as PoolTrackKind

CLIENTS_OUTCOMES: Final = frozenset(
    {
        *("FIELD_OUT_OF_RANGE", "FIELD_UNKNOWN", "INVALID_UTF8", "MESSAGE_MALFORMED", "MESSAGE_TOO_LARGE"),
        *("PROMPT_TOO_LONG", "RESUME_TOKEN_INVALID", "IDEMPOTENCY_KEY_REUSED", "COST_EXCEEDS_BURST"),
        *("CREDENTIALS_MISSING", "CREDENTIALS_UNKNOWN", "TENANT_DISABLED", "TENANT_UNKNOWN"),
        *("REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED", "ALREADY_FINISHED"),
        *("SLOW_READER", "DEADLINE", "REQUEST_TIMEOUT", "INFEASIBLE_DEADLINE", "SUPERSEDED", "CLIENT_GONE"),
        *("LIVE_REQUESTS_FULL", "CALLS_FULL", "DRAINING"),
        "REGION_UNAVAILABLE",  # a policy of residency or of guests, and no fault of a version
    }
)
"""Outcomes that a client, its limits or the frontend caused. They are shown and not judged."""

OPEN_MAX: Final = 8192
"""Open requests of one batch that the judge sees. Beyond it, counts stay exact only to this number."""

assert TABLE.keys() >= CLIENTS_OUTCOMES, "an outcome of clients is no error reason"


def tracks_of(content: Content) -> dict[str, Track]:
    """Return the judge's track by pool."""
    names: dict[PoolTrackKind, Track] = {
        PoolTrackKind.STABLE: STABLE,
        PoolTrackKind.CANARY: CANARY,
        PoolTrackKind.BASELINE: BASELINE,
    }
    return {pool.pool: names[pool.track] for pool in content.pools if pool.track in names}


def batch_of(
    message: pb.ObservationBatch, frontend: str, tracks: Mapping[str, Track], rollout: str, now_s: float
) -> Batch:
    """Return the judge's batch. `frontend`: unique per start. `now_s`: the leader's clock at the arrival.

    INVARIANT: a row of a request that the rollout did not place never counts.
    """

    def track_of(pool: str, chosen_by: str) -> Track | None:
        return tracks.get(pool) if chosen_by == rollout else None

    end_s = now_s - message.age_ms / 1000
    ends = []
    for row in message.ends:
        track = track_of(row.pool, row.rollout)
        if track is not None:
            ends.append(_end(row, track, end_s))
    listed: dict[Track, list[OpenRequest]] = {}
    for each in message.open:
        track = track_of(each.pool, each.rollout)
        if track is not None:
            listed.setdefault(track, []).append(_open(each, track))
    counts = [
        TrackCounts(
            track,
            started=count.started,
            # A frontend counts a dropped row apart from the rows that ended; the judge counts it as ended, too.
            ended=count.ended + count.dropped,
            dropped=count.dropped,
        )
        for count in message.counts
        if (track := tracks.get(count.pool)) is not None
    ]
    opened = list(_padded(message.counts, tracks, listed))
    return Batch(frontend, message.sequence, tuple(ends), tuple(opened), tuple(counts))


def _end(row: pb.RequestEnd, track: Track, end_s: float) -> RequestEnd:
    ended_s = end_s - row.age_ms / 1000
    is_ok = row.outcome == OK
    return RequestEnd(
        track=track,
        session=f"{row.session:016x}",
        outcome=OK if is_ok else CLIENT if row.outcome in CLIENTS_OUTCOMES else row.outcome,
        started_s=ended_s - row.duration_s,
        ended_s=ended_s,
        ttft_s=row.ttft_s if row.HasField("ttft_s") else None,
        queue_s=row.queue_s,
        prompt_tokens=row.prompt_tokens,
        computed_tokens=row.computed_tokens if row.HasField("computed_tokens") else None,
        gap_median_s=row.gap_median_s if row.HasField("gap_median_s") else None,
        gap_p95_s=row.gap_p95_s if row.HasField("gap_p95_s") else None,
        running_requests=row.running_requests,
        output_tokens=row.output_tokens,
        finish_reason=row.finish_reason,
        prefill=row.prefill_replica,
        decode=row.decode_replica,
        failed_attempts=tuple(
            FailedAttempt(each.fault, each.replica, ended_s - each.age_ms / 1000)
            for each in row.failed_attempts
        ),
    )


def _open(row: pb.OpenRequest, track: Track) -> OpenRequest:
    return OpenRequest(
        track,
        f"{row.session:016x}",
        age_s=row.age_s,
        has_first_token=row.has_first_token,
        gap_so_far_s=row.silent_s if row.has_first_token else 0.0,
        prompt_tokens=row.prompt_tokens,
        queue_s=row.queue_s,
        running_requests=row.running_requests,
    )


def _padded(
    counts: Iterable[pb.TrackCounts], tracks: Mapping[str, Track], listed: Mapping[Track, list[OpenRequest]]
) -> Iterator[OpenRequest]:
    """Yield the listed open requests, and one that streams for each that is open and not listed."""
    for rows in listed.values():
        yield from rows
    for count in counts:
        track = tracks.get(count.pool)
        if track is not None:
            streaming = OpenRequest(track, "", age_s=0.0, has_first_token=True)
            missing = min(count.open, OPEN_MAX) - len(listed.get(track, ()))
            yield from (streaming for _ in range(max(0, missing)))
