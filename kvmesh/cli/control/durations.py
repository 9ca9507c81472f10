"""Durations on the command line: "90s", "30m", "2h". Pure."""

from __future__ import annotations

import math
import re
from typing import Final

from google.protobuf.duration_pb2 import Duration

from kvmesh.bad_option import BadOption

_SYNTAX: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h)", re.ASCII)
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WORDS: Final = (("h", 3600), ("min", 60), ("s", 1))


def parse(option: str, text: str, low_s: float, high_s: float) -> float:
    """Return the seconds of `text`. Raises BadOption with the range."""
    allowed = f"allowed are {short(low_s)} to {short(high_s)}, written like 90s, 30m or 2h"
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise BadOption(f'{option} = "{text}" is no duration: {allowed}.')
    seconds = float(found[1]) * _UNITS_S[found[2]]
    if not low_s <= seconds <= high_s:
        raise BadOption(f"{option} = {text} is out of range: {allowed}.")
    return seconds


def message(seconds: float) -> Duration:
    """Return `seconds` as a message, to the millisecond."""
    whole, rest_ms = divmod(round(seconds * 1000), 1000)
    return Duration(seconds=whole, nanos=rest_ms * 1_000_000)


def seconds_of(duration: Duration) -> float:
    """Return the seconds of a message."""
    return duration.seconds + duration.nanos / 1e9


def short(seconds: float) -> str:
    """Return `seconds` in the syntax of `parse`, in the largest unit that gives a whole number."""
    for unit, size_s in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size_s and seconds % size_s == 0:
            return f"{seconds / size_s:.0f}{unit}"
    return f"{seconds:.10g}s"


def words(seconds: float) -> str:
    """Return `seconds` for tables: two units at most, for example "1 h 30 min"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s".replace(".0 s", " s")
    left, shown = math.floor(seconds), list[str]()
    for unit, size in _WORDS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not shown):
            shown.append(f"{count} {unit}")
    return " ".join(shown[:2])
