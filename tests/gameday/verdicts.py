"""Verdicts about the aims of a game day, and the windows of a run to which aims refer. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.gameday.bins import Window
from tests.gameday.calls import GOOD
from tests.gameday.records import Record
from tests.gameday.shapes import BATCH, USERS

FREE: Final = (USERS, BATCH)
"""Kinds of callers that any region may serve."""

SETTLE_S: Final = 5.0
"""Time after which clients have left a dead region."""

NOTHING: Final = "nothing was measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An aim of a run, and what was measured."""

    aim: str
    measured: str
    is_met: bool


Judge = Callable[[Record], Verdict]


def judged(judges: tuple[Judge, ...], record: Record) -> list[Verdict]:
    """Return the verdicts of a run."""
    return [judge(record) for judge in judges]


def fault(record: Record, after_s: float = 0.0, **chosen: tuple[str, ...]) -> Window:
    """Return the window of the event, from `after_s` to its healing."""
    return Window(record.bins, after_s, record.times.heal_s, **chosen)


def steady(record: Record, **chosen: tuple[str, ...]) -> Window:
    """Return the window before the event."""
    return Window(record.bins, record.times.steady_s, 0.0, **chosen)


def whole(record: Record, **chosen: tuple[str, ...]) -> Window:
    """Return the window from the event to the end."""
    return Window(record.bins, 0.0, record.times.ended_s + 1.0, **chosen)


def with_open(record: Record, **chosen: tuple[str, ...]) -> Window:
    """Return the window from before the event to the end: requests that the event finds open were sent before it."""
    return Window(record.bins, record.times.steady_s, record.times.ended_s + 1.0, **chosen)


def at_least(aim: str, window: Window, least: float) -> Verdict:
    """Judge the share of good requests."""
    share = window.share(GOOD)
    if share is None:
        return Verdict(aim, NOTHING, is_met=False)
    return Verdict(aim, f"{share:.2%} of {window.sent}", share >= least)
