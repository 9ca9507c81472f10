"""The aims of a game day that are judged from the states and grants of regions. Pure."""

from __future__ import annotations

from typing import Final

from tests.gameday.records import Record
from tests.gameday.verdicts import NOTHING, SETTLE_S, Verdict, fault
from tests.gameday.views import HEALTHY, SUSPECT

GRANT_SLACK: Final = 1.1
"""Requests in flight, and the change of a grant between two looks, may exceed a grant by a tenth."""

DRAINS: Final = ("DRAINING", "DRAINED")


def no_transition(record: Record) -> Verdict:
    """Judge that every region is observed HEALTHY throughout."""
    return _states(record, "no transition", (HEALTHY,))


def suspect_at_most(record: Record) -> Verdict:
    """Judge that no region is observed worse than SUSPECT."""
    return _states(record, "SUSPECT at most", (HEALTHY, SUSPECT))


def spill_within_grant(record: Record) -> Verdict:
    """Judge that the overloaded region spills, and that what others serve of it stays within their grants."""
    aim = "spill up to the grant"
    moved = fault(record, SETTLE_S, homes=(record.target,)).by_region("uncached")
    seconds = record.times.heal_s - SETTLE_S
    spilled_per_s = sum(count for region, count in moved.items() if region != record.target) / seconds
    granted = _granted_per_s(record)
    if granted is None:
        return Verdict(aim, NOTHING, is_met=False)
    measured = f"{spilled_per_s:.0f} of {granted:.0f} granted tokens/s"
    return Verdict(aim, measured, 0 < spilled_per_s <= GRANT_SLACK * granted)


def all_drained(record: Record) -> Verdict:
    """Judge that each region said of itself that it had no weight, and that it serves again.

    The event waits for DRAINED itself. Its control plane is replaced within a second, before each look can see that.
    """
    seen = {
        name: [view for view in record.views if view.by == view.region == name] for name in record.regions
    }
    drained = [
        name
        for name, views in seen.items()
        if any(view.declared in DRAINS and view.weight == 0 for view in views)
        and views[-1].declared == "SERVING"
    ]
    measured = f"{', '.join(drained) or 'none'} of {', '.join(record.regions)}"
    return Verdict("each region was drained and serves again", measured, len(drained) == len(record.regions))


def _states(record: Record, aim: str, allowed: tuple[str, ...]) -> Verdict:
    seen = [view for view in record.views if view.at_s >= 0 and view.by != view.region]
    others = [view for view in seen if view.observed not in allowed]
    if not seen:
        return Verdict(aim, NOTHING, is_met=False)
    measured = f"{len(seen)} looks"
    if others:
        first = others[0]
        measured = (
            f"{first.by} observed {first.region} {first.observed} after {first.at_s:.0f} s: {first.reason}"
        )
    return Verdict(aim, measured, not others)


def _granted_per_s(record: Record) -> float | None:
    """Return the mean of the grants to the target, over all regions that give one."""
    looks: dict[str, list[float]] = {}
    for view in record.views:
        if SETTLE_S <= view.at_s < record.times.heal_s and view.by == view.region != record.target:
            looks.setdefault(view.by, []).append(view.grants.get(record.target, 0.0))
    return sum(sum(each) / len(each) for each in looks.values()) if looks else None
