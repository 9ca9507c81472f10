"""The option `--until` of `kvmesh region drain`: "18:00" of today, or a time in ISO 8601.

The present time is an argument.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from kvmesh.bad_option import BadOption

AN_HOUR: Final = timedelta(hours=1)

_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})", re.ASCII)


def until_s(text: str, now: datetime) -> float:
    """Return the Unix time of `text`. `now` has the time zone of times without one. Raises BadOption with the range."""
    example = (now.replace(microsecond=0) + AN_HOUR).isoformat()
    allowed = f"allowed are a later time of today as HH:MM, or a later time in ISO 8601, such as {example}"
    found = _parsed(text, now)
    if found is None:
        raise BadOption(f'--until = "{text}" is no time: {allowed}.')
    if found <= now:
        raise BadOption(f"--until = {text} is in the past, it is {now:%Y-%m-%d %H:%M} now: {allowed}.")
    return found.timestamp()


def _parsed(text: str, now: datetime) -> datetime | None:
    try:
        if clock := _CLOCK.fullmatch(text):
            return now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=now.tzinfo)
