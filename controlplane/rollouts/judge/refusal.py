"""Checks of observations and events before they count. A refused batch changes nothing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from controlplane.rollouts.judge.events import Event, MemoryReading
from controlplane.rollouts.judge.observation import TRACKS, Batch, OpenRequest, RequestEnd, TrackCounts

ROWS_MAX: Final = 65_536
"""Ends of a batch, and open requests of a batch."""
ATTEMPTS_MAX: Final = 64
TEXT_MAX: Final = 256
"""Characters of a name."""
SECONDS_MAX: Final = 86_400.0
"""Of a duration."""
CLOCK_MAX_S: Final = 1e11
TOKENS_MAX: Final = 100_000_000
COUNT_MAX: Final = 1_000_000_000
BYTES_MAX: Final = 1 << 50


class ObservationError(ValueError):
    """An observation out of range, with the path of its field."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field} is {shown}; {allowed} is allowed")
        self.field = field


class _Range(NamedTuple):
    """The allowed values of a numeric field."""

    name: str
    high: float
    is_whole: bool = False
    is_optional: bool = False


_END: Final = (
    _Range("started_s", CLOCK_MAX_S),
    _Range("ended_s", CLOCK_MAX_S),
    _Range("ttft_s", SECONDS_MAX, is_optional=True),
    _Range("queue_s", SECONDS_MAX),
    _Range("prompt_tokens", TOKENS_MAX, is_whole=True),
    _Range("computed_tokens", TOKENS_MAX, is_whole=True, is_optional=True),
    _Range("gap_median_s", SECONDS_MAX, is_optional=True),
    _Range("gap_p95_s", SECONDS_MAX, is_optional=True),
    _Range("running_requests", COUNT_MAX, is_whole=True),
    _Range("output_tokens", TOKENS_MAX, is_whole=True),
)
_OPEN: Final = (
    _Range("age_s", SECONDS_MAX),
    _Range("gap_so_far_s", SECONDS_MAX),
    _Range("queue_s", SECONDS_MAX),
    _Range("running_requests", COUNT_MAX, is_whole=True),
    _Range("prompt_tokens", TOKENS_MAX, is_whole=True),
    _Range("computed_tokens", TOKENS_MAX, is_whole=True, is_optional=True),
)
_COUNTS: Final = tuple(_Range(name, COUNT_MAX, is_whole=True) for name in ("started", "ended", "dropped"))
_END_TEXTS: Final = ("finish_reason", "prefill", "decode")


def check_batch(batch: Batch) -> None:
    """Raise ObservationError for the first field of `batch` out of range."""
    _text("frontend", batch.frontend)
    _number("number", batch.number, _Range("number", COUNT_MAX, is_whole=True))
    _rows("ends", len(batch.ends))
    _rows("open_requests", len(batch.open_requests))
    for index, end in enumerate(batch.ends):
        _check_end(f"ends[{index}]", end)
    for index, request in enumerate(batch.open_requests):
        _check_row(f"open_requests[{index}]", request, _OPEN)
        _text(f"open_requests[{index}].session", request.session, least=0)
    _check_counts(batch)


def check_event(event: Event) -> None:
    """Raise ObservationError for the first field of `event` out of range."""
    _track("track", event.track)
    _text("replica", event.replica)
    _number("at_s", event.at_s, _Range("at_s", CLOCK_MAX_S))
    if isinstance(event, MemoryReading):
        _text("role", event.role)
        _number("memory_bytes", event.memory_bytes, _Range("memory_bytes", BYTES_MAX, is_whole=True))


def _check_end(path: str, end: RequestEnd) -> None:
    _check_row(path, end, _END)
    _text(f"{path}.session", end.session)
    _text(f"{path}.outcome", end.outcome)
    for name in _END_TEXTS:
        _text(f"{path}.{name}", getattr(end, name), least=0)
    if len(end.failed_attempts) > ATTEMPTS_MAX:
        raise ObservationError(f"{path}.failed_attempts", len(end.failed_attempts), f"0 to {ATTEMPTS_MAX}")
    for index, attempt in enumerate(end.failed_attempts):
        _text(f"{path}.failed_attempts[{index}].error_class", attempt.error_class)
        _text(f"{path}.failed_attempts[{index}].replica", attempt.replica, least=0)
        _number(f"{path}.failed_attempts[{index}].at_s", attempt.at_s, _END[0])
    if end.ended_s < end.started_s:
        raise ObservationError(f"{path}.ended_s", end.ended_s, f"started_s, {end.started_s}, or later")


def _check_counts(batch: Batch) -> None:
    rows: dict[str, int] = dict.fromkeys(TRACKS, 0)
    for end in batch.ends:
        rows[end.track] += 1
    seen: dict[str, int] = dict.fromkeys(TRACKS, 0)
    for index, counts in enumerate(batch.counts):
        _check_row(f"counts[{index}]", counts, _COUNTS)
        seen[counts.track] += 1
        if seen[counts.track] > 1:
            raise ObservationError(f"counts[{index}].track", counts.track, "one row per track")
        if counts.ended < rows[counts.track] + counts.dropped:
            allowed = f"at least the rows and dropped, {rows[counts.track]} + {counts.dropped},"
            raise ObservationError(f"counts[{index}].ended", counts.ended, allowed)


def _check_row(path: str, row: RequestEnd | OpenRequest | TrackCounts, ranges: Iterable[_Range]) -> None:
    if row.track not in TRACKS:
        _track(f"{path}.track", row.track)
    for each in ranges:
        value = getattr(row, each.name)
        # The usual case in one comparison; it is false for NaN.
        if type(value) is not (int if each.is_whole else float) or not 0 <= value <= each.high:
            _number(f"{path}.{each.name}", value, each)


def _track(field: str, track: object) -> None:
    if track not in TRACKS:
        raise ObservationError(field, track, " or ".join(TRACKS))


def _rows(field: str, number: int) -> None:
    if number > ROWS_MAX:
        raise ObservationError(field, f"{number} rows", f"0 to {ROWS_MAX} rows")


def _text(field: str, value: object, least: int = 1) -> None:
    if not isinstance(value, str) or not least <= len(value) <= TEXT_MAX:
        raise ObservationError(field, value, f"a text of {least} to {TEXT_MAX} characters")


def _number(field: str, value: object, allowed: _Range) -> None:
    if value is None and allowed.is_optional:
        return
    kinds: tuple[type, ...] = (int,) if allowed.is_whole else (int, float)
    kind = "a whole number" if allowed.is_whole else "a finite number"
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise ObservationError(field, value, f"{kind} from 0 to {allowed.high:g}")
    if not 0 <= value <= allowed.high:
        raise ObservationError(field, value, f"{kind} from 0 to {allowed.high:g}")
