"""Samples of an arm for the tests: one value per session, and counts of sessions with errors. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from controlplane.rollouts.judge.observation import OpenRequest
from controlplane.rollouts.judge.session import MICROSECONDS, Cell, SessionTotals, session_key
from controlplane.rollouts.judge.statistics.ranks import Sample
from controlplane.rollouts.judge.track import TrackStatistics

Row: TypeAlias = tuple[int, float, bool]
"""Stratum, value, and whether the value is a lower bound."""

WORK_BUCKETS: Final = 32
"""Above the buckets of tokens. The stratum of a TTFT is a bucket of running requests times this, plus one of tokens."""

STRATA_PER_STEP: Final = WORK_BUCKETS * WORK_BUCKETS
"""Above all strata of one step, so that those of different steps can stay apart."""

LATER_SHARE_MIN: Final = 0.05
"""Share of the sessions with a second request from which on those are compared alone."""


@dataclass(slots=True)
class OpenTotals:
    """Requests of a session that wait for their first token, out of all queues."""

    n: int = 0
    age_us: int = 0
    """Without the time in queues."""
    tokens: int = 0
    running: int = 0


OpenBySession: TypeAlias = Mapping[int, OpenTotals]


def open_by_session(requests: Iterable[OpenRequest], age_max_s: float) -> dict[int, OpenTotals]:
    """Return the requests without a first token and of a known prompt by session, at most `age_max_s` old.

    A request that was in queues all the time tells nothing, and is left out.
    """
    found: dict[int, OpenTotals] = {}
    for request in requests:
        is_known = request.session and request.prompt_tokens > 0
        if request.has_first_token or not is_known or request.age_s > age_max_s:
            continue
        age_us = round((request.age_s - request.queue_s) * MICROSECONDS)
        if age_us <= 0:
            continue
        totals = found.setdefault(session_key(request.session), OpenTotals())
        totals.n += 1
        totals.age_us += age_us
        totals.tokens += request.prompt_tokens if request.computed_tokens is None else request.computed_tokens
        totals.running += request.running_requests
    return found


def power_bucket(value: float) -> int:
    """Return the bucket of a value: 0 below 1, and then one per power of two."""
    return int(value).bit_length()


def stratum_name(stratum: int, units: Sequence[str]) -> str:
    """Return the buckets of a stratum for people. `units`: of its buckets, those of the lowest digit first."""
    names = []
    for unit in units:
        stratum, bucket = divmod(stratum, WORK_BUCKETS)
        names.append(bucket_name(bucket, unit))
    return ", ".join(names) or "all"


def bucket_name(bucket: int, unit: str) -> str:
    """Return the range of a bucket, for people."""
    if bucket == 0:
        return f"no {unit}"
    low, high = 1 << (bucket - 1), (1 << bucket) - 1
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def ttft_sample(track: TrackStatistics, waiting: OpenBySession) -> Sample:
    """Return the mean TTFT of each session without its time in queues, in buckets of its mean load and uncached tokens.

    Sessions in one queue are not independent of each other, and a queue depends on the load of the pool. So does the
    batch in which a prompt is computed: the load is the mean of the running requests at decode.
    Requests without a token enter the mean if they raise it; the mean is then a lower bound.
    """
    rows = []
    for key, totals in track.sessions.items():
        rows.append(_ttft(totals, waiting.get(key)))
    for key, late in waiting.items():
        if key <= track.key_max and key not in track.sessions:
            rows.append(_ttft(SessionTotals(), late))
    return _sample(rows)


def gap_sample(track: TrackStatistics) -> Sample:
    """Return the mean of each session's median gaps, in buckets of its mean running requests."""
    return _sample(
        (
            (power_bucket(each.running / each.gap_n), each.gap_us / each.gap_n / MICROSECONDS, False)
            if each.gap_n
            else None
        )
        for each in track.sessions.values()
    )


def computed_sample(track: TrackStatistics, *, is_later: bool) -> Sample:
    """Return each session's computed share of its prompt tokens. `is_later`: without its first request."""
    share = _later_share if is_later else _share
    return _sample(
        (0, value, False) if (value := share(each)) is not None else None for each in track.sessions.values()
    )


def has_later_requests(track: TrackStatistics) -> bool:
    """Whether enough sessions have a second request."""
    later = sum(each.share_n >= 2 for each in track.sessions.values())
    return later > 0 and later >= LATER_SHARE_MIN * len(track.sessions)


def values_above(track: TrackStatistics, ttft_s: float) -> tuple[int, int]:
    """Return the sessions with a mean TTFT above `ttft_s`, and all sessions with a TTFT or a lower bound above."""
    above = known = 0
    for totals in track.sessions.values():
        late_n, late_us = totals.late_n + totals.queued_n, totals.late_us + totals.queued_us
        found = _mean(totals.ttft_n, totals.ttft_us, late_n, late_us)
        if found is None:
            continue
        mean_s, is_bound = found
        is_above = mean_s > ttft_s
        above += is_above
        known += is_above or not is_bound
    return above, known


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Sessions of an arm, and how many had an error: one at most per session, and one per replica and second."""

    sessions: int = 0
    any_error: int = 0
    by_class: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: ErrorCounts) -> ErrorCounts:
        """Return the counts of both."""
        classes = Counter(dict(self.by_class))
        classes.update(dict(other.by_class))
        return ErrorCounts(self.sessions + other.sessions, self.any_error + other.any_error, dict(classes))


def error_counts(track: TrackStatistics) -> ErrorCounts:
    """Count the sessions with an error, of all classes and by class.

    Errors of one replica within one second count for the session with the lowest key. Of a track with more sessions than
    are kept, such bursts therefore weigh a little more.
    """
    cells: dict[str, dict[Cell, int]] = {}
    any_cells: dict[Cell, int] = {}
    for key in sorted(key for key, each in track.sessions.items() if each.errors):
        for name, seen in track.sessions[key].errors.items():
            owners = cells.setdefault(name, {})
            for cell in seen:
                owners.setdefault(cell, key)
                any_cells.setdefault(cell, key)
    judged = sum(each.judged > 0 or bool(each.errors) for each in track.sessions.values())
    by_class = {name: len(set(owners.values())) for name, owners in sorted(cells.items())}
    return ErrorCounts(judged, len(set(any_cells.values())), by_class)


def _ttft(totals: SessionTotals, waiting: OpenTotals | None) -> Row | None:
    late_n, late_us = totals.late_n, totals.late_us - totals.late_queue_us
    work_n, work_tokens, running = totals.work_n, totals.work_tokens, totals.work_running
    if waiting is not None:
        late_n, late_us = late_n + waiting.n, late_us + waiting.age_us
        work_n, work_tokens = work_n + waiting.n, work_tokens + waiting.tokens
        running += waiting.running
    found = _mean(totals.ttft_n, totals.ttft_us - totals.queue_us, late_n, late_us)
    if found is None or work_n == 0:
        return None
    stratum = power_bucket(running / work_n) * WORK_BUCKETS + power_bucket(work_tokens / work_n)
    return stratum, *found


def _mean(known_n: int, known_us: int, late_n: int, late_us: int) -> tuple[float, bool] | None:
    """Return the mean in seconds, and whether it is a lower bound. None: nothing is known.

    Times that are lower bounds enter the mean if they raise it.
    """
    if known_n == 0 and late_us == 0:
        return None
    is_bound = late_n > 0 and (known_n == 0 or late_us * known_n > known_us * late_n)
    mean_us = (known_us + late_us) / (known_n + late_n) if is_bound else known_us / known_n
    return mean_us / MICROSECONDS, is_bound


def _share(totals: SessionTotals) -> float | None:
    return totals.computed_tokens / totals.prompt_tokens if totals.share_n else None


def _later_share(totals: SessionTotals) -> float | None:
    if totals.share_n < 2 or totals.first is None:
        return None
    _, prompt, computed = totals.first
    return (totals.computed_tokens - computed) / (totals.prompt_tokens - prompt)


def _sample(rows: Iterable[Row | None]) -> Sample:
    kept = [row for row in rows if row is not None]
    return Sample(
        np.array([row[0] for row in kept], dtype=np.int64),
        np.array([row[1] for row in kept], dtype=np.float64),
        np.array([row[2] for row in kept], dtype=np.bool_),
    )
