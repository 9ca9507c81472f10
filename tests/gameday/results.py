"""The result of one run: its record without bins and views, with its verdicts and figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tests.gameday import aims
from tests.gameday.bins import Window
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, OUTCOMES, REFUSED
from tests.gameday.events import BY_NAME, EVENTS, PLAN
from tests.gameday.records import Record, RunFacts
from tests.gameday.verdicts import FREE, fault, judged, steady, whole

_RANK: Final = {event.name: at for at, event in enumerate(EVENTS)}


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict about one aim."""

    aim: str
    measured: str
    met: bool


class Result(RunFacts, frozen=True, kw_only=True):
    """One run as the page tells it."""

    aims: tuple[Aim, ...]
    outcomes: Mapping[str, int]
    figures: tuple[str, ...]
    """Cells of the table of figures, behind those that name the run."""
    is_survived: bool
    """True if the regions that are left carried the load."""


def result_of(record: Record) -> Result:
    """Return the result of a run."""
    kept = {name: getattr(record, name) for name in RunFacts.__struct_fields__}
    found = judged(BY_NAME[record.event].judges_at(record.load), record)
    return Result(
        **kept,
        aims=tuple(Aim(aim=each.aim, measured=each.measured, met=each.is_met) for each in found),
        outcomes={name: whole(record).count(name) for name in OUTCOMES},
        figures=_figures(record),
        is_survived=aims.good_after_5_s(record).is_met,
    )


def in_order(results: Iterable[Result]) -> list[Result]:
    """Return the results in the order of the events; those of unknown events are left out."""
    known = [each for each in results if each.event in _RANK]
    return sorted(
        known,
        key=lambda each: (_RANK[each.event], each.load != PLAN, len(each.regions), each.load, each.number),
    )


def merged(kept: Iterable[Result], records: Iterable[Record]) -> list[Result]:
    """Return the results of `records`, and those of `kept` whose run has no later record. A rejected run replaces none."""
    found = {each.key: each for each in kept}
    for record in records:
        old = found.get(record.key)
        if record.event in _RANK and (old is None or (not record.problems and record.began >= old.began)):
            found[record.key] = result_of(record)
    return in_order(found.values())


def percent(share: float | None) -> str:
    """Return a share in percent; a dash without one."""
    return "-" if share is None else f"{100 * share:.2f}"


def _figures(record: Record) -> tuple[str, ...]:
    window, before = whole(record), steady(record, kinds=FREE)
    free = whole(record, kinds=FREE)
    after = Window(record.bins, record.times.healed_s, record.times.ended_s, kinds=FREE)
    return (
        str(window.sent),
        percent(free.share(GOOD)),
        percent(free.share(REFUSED)),
        str(free.count(BARE, FAILED, CUT)),
        str(free.total("resumes")),
        f"{window.total('attempts') / max(window.sent, 1):.3f}",
        _ms(before.ttft_ms()),
        _ms(fault(record, kinds=FREE).ttft_ms()),
        _ms(after.ttft_ms()),
        f"{record.capacity.hit_ratio:.2f}",
        f"{100 * record.busy:.0f}",
        f"{record.late_s:.2f}",
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
