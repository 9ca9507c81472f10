"""Samples of an arm for the tests: one value per session, and counts of sessions with errors. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from controlplane.rollouts.judge.observation import OpenRequest
from controlplane.rollouts.judge.session import KEY_MAX, MICROSECONDS, Cell, SessionTotals, session_key
from controlplane.rollouts.judge.statistics.ranks import Sample
from controlplane.rollouts.judge.track import TrackStatistics

Row: TypeAlias = tuple[int, float, bool]
"""Stratum, value, and whether the value is a lower bound."""

ANY: Final = "any class"
"""Errors of all classes together."""

BURST_S: Final = 5
"""Longest burst of errors. A replica that fails for longer is ejected, or its version is at fault."""

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


class Bursts(NamedTuple):
    """Sessions of a track with an error of one class, and how they cluster.

    A burst is a run of seconds in which one replica has errors, at most BURST_S long. So the death of an engine is one
    burst, and a fault that lasts is many.
    """

    sessions: int = 0
    members: int = 0
    """Sum of the sessions of all bursts. A session may be in several."""
    squares: int = 0
    """Sum of the squares of the sessions of all bursts."""

    @classmethod
    def of_sessions(cls, bursts: Sequence[set[int]]) -> Bursts:
        """Return the counts of bursts. Each is the keys of its sessions."""
        sizes = [len(keys) for keys in bursts]
        return cls(len(set().union(*bursts)), sum(sizes), sum(size * size for size in sizes))

    @property
    def size(self) -> float:
        """Design effect (Kish): the size of the burst that an error is in, on average. At least 1."""
        return self.squares / self.members if self.members else 1.0


NO_BURSTS: Final = Bursts()


class TrackErrors(NamedTuple):
    """Errors of one track, one at most per session and class."""

    sessions: int
    kept_share: float
    """Share of the sessions that is kept, a uniform sample. Bursts are as much smaller in it."""
    bursts: Mapping[str, Bursts]
    """By class; all classes together under ANY."""

    def of(self, name: str) -> Bursts:
        """Return the bursts of a class, or of ANY."""
        return self.bursts.get(name, NO_BURSTS)

    def size(self, name: str) -> float:
        """Return the mean size of the bursts, before sessions were left out."""
        return 1.0 + (self.of(name).size - 1.0) / self.kept_share

    def effective(self, name: str, size: float) -> tuple[float, float]:
        """Return errors and sessions, divided by the size that bursts of `size` have in this track."""
        kept = 1.0 + (size - 1.0) * self.kept_share
        return self.of(name).sessions / kept, self.sessions / kept


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Sessions of an arm, and how many had an error: one at most per session, and one per burst."""

    sessions: int = 0
    any_error: int = 0
    by_class: Mapping[str, int] = field(default_factory=dict)
    tracks: tuple[TrackErrors, ...] = ()
    """The same by track, with every session that had an error."""

    def plus(self, other: ErrorCounts) -> ErrorCounts:
        """Return the counts of both."""
        classes = Counter(dict(self.by_class))
        classes.update(dict(other.by_class))
        return ErrorCounts(
            self.sessions + other.sessions,
            self.any_error + other.any_error,
            dict(classes),
            self.tracks + other.tracks,
        )

    def all_errors(self, name: str) -> int:
        """Return the sessions with an error of a class, or of ANY."""
        return sum(track.of(name).sessions for track in self.tracks)

    def burst_size(self, name: str) -> float:
        """Return the mean size of the bursts of all tracks. At least 1."""
        members = sum(track.of(name).members for track in self.tracks)
        weighted = sum(track.of(name).members * track.size(name) for track in self.tracks)
        return weighted / members if members else 1.0

    def effective(self, name: str, size: float) -> tuple[float, float]:
        """Return errors and sessions of independent samples that tell as much (Rao and Scott 1992)."""
        found = [track.effective(name, size) for track in self.tracks]
        return sum(errors for errors, _ in found), sum(sessions for _, sessions in found)


def error_counts(track: TrackStatistics) -> ErrorCounts:
    """Count the sessions with an error, of all classes and by class.

    The errors of one burst count for the session with the lowest key. Of a track with more sessions than are kept, bursts
    therefore weigh a little more.
    """
    cells: dict[str, dict[Cell, list[int]]] = {ANY: {}}
    for key in sorted(key for key, each in track.sessions.items() if each.errors):
        errors = track.sessions[key].errors
        for name, seen in (*errors.items(), (ANY, {cell for each in errors.values() for cell in each})):
            for cell in seen:
                cells.setdefault(name, {}).setdefault(cell, []).append(key)
    judged = sum(each.judged > 0 or bool(each.errors) for each in track.sessions.values())
    found = {name: list(_bursts(owners)) for name, owners in sorted(cells.items())}
    by_class = {name: len({min(keys) for keys in bursts}) for name, bursts in found.items()}
    any_error = by_class.pop(ANY)
    kept_share = max(track.key_max, 1) / KEY_MAX
    sizes = {name: Bursts.of_sessions(bursts) for name, bursts in found.items()}
    return ErrorCounts(judged, any_error, by_class, (TrackErrors(judged, kept_share, sizes),))


def _bursts(owners: Mapping[Cell, list[int]]) -> Iterator[set[int]]:
    """Yield the sessions of each burst: a run of seconds in which one replica has errors, at most BURST_S long."""
    keys: set[int] = set()
    replica, began_s, last_s = "", 0, 0
    for second, name in sorted(owners, key=lambda cell: (cell[1], cell[0])):
        is_same = name == replica and second - last_s <= 1 and second - began_s < BURST_S
        if keys and not is_same:
            yield keys
        if not (keys and is_same):
            keys, replica, began_s = set(), name, second
        last_s = second
        keys.update(owners[second, name])
    if keys:
        yield keys


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
