"""The page docs/measurements/regions.md and its record. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from bench import pages
from tests.gameday import aims
from tests.gameday.bins import Window
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, OUTCOMES, REFUSED
from tests.gameday.events import BY_NAME, EVENTS, PLAN
from tests.gameday.records import Capacity, Key, Record
from tests.gameday.verdicts import FREE, SETTLE_S, Verdict, fault, judged, steady, whole

HEAD: Final = ("event", "load", "regions", "run", "aim", "measured", "met")
FIGURES_HEAD: Final = (
    *("event", "load", "regions", "run", "requests", "good, %", "refused, %", "lost", "resumed"),
    *(
        "attempts per request",
        "p95 TTFT before, ms",
        "during, ms",
        "after, ms",
        "hit ratio",
        "busy, %",
        "late, s",
    ),
)
PLANNED_HEAD: Final = ("regions", "planned utilisation", "survived", "highest load that survived")


def page(
    records: Sequence[Record], command: str, machine: Mapping[str, str], pictures: Mapping[Key, str]
) -> list[str]:
    """Return the page's lines. `pictures`: the file of each drawn run."""
    return ["# Regions", "", *lines(records, command, machine, pictures)]


def lines(
    records: Sequence[Record], command: str, machine: Mapping[str, str], pictures: Mapping[Key, str]
) -> list[str]:
    """Return the page's lines behind its title."""
    ordered = in_order(records)
    missed = sum(not each.is_met for record in ordered for each in verdicts(record))
    total = sum(len(verdicts(record)) for record in ordered)
    made = [*pages.paragraph(_about(ordered, command, machine)), "", *pages.paragraph(_PROCEDURE), ""]
    made += [*pages.paragraph(f"{total - missed} of {total} aims are met."), ""]
    made += pages.section(
        "Aims", pages.table(HEAD, [row for each in ordered for row in _aim_rows(each)], "llrrlll")
    )
    made += pages.section("Figures", pages.table(FIGURES_HEAD, map(_figures, ordered), "llrrr"))
    made += pages.section("The planned load", _planned(ordered))
    made += pages.section("Over time", _shown(ordered, pictures))
    return made + pages.section("Doubts", _doubts(ordered))


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the records in the order of the events; those of unknown events are left out."""
    rank = {event.name: at for at, event in enumerate(EVENTS)}
    known = [record for record in records if record.event in rank]
    return sorted(
        known, key=lambda each: (rank[each.event], each.load != PLAN, len(each.regions), each.number)
    )


def verdicts(record: Record) -> list[Verdict]:
    """Return the verdicts of a run."""
    return judged(BY_NAME[record.event].judges_at(record.load), record)


def misses(records: Iterable[Record]) -> int:
    """Return the number of missed aims."""
    return sum(not each.is_met for record in in_order(records) for each in verdicts(record))


def drawn(records: Iterable[Record]) -> list[Record]:
    """Return the runs that are drawn: the first one of each event, load and number of regions."""
    return [record for record in in_order(records) if record.number == 1]


def summary(record: Record) -> str:
    """Return one run in one line, and a line for each missed aim."""
    found = verdicts(record)
    met = sum(each.is_met for each in found)
    told = [
        f"{met} of {len(found)} aims met",
        f"{whole(record).sent} requests",
        f"{_percent(fault(record, SETTLE_S, kinds=FREE).share(GOOD))} % good after 5 s",
        f"{100 * record.busy:.0f} % busy",
        f"{record.late_s:.2f} s late",
        *record.problems,
        *record.notes,
    ]
    missed = [f"\n  MISSED {each.aim}: {each.measured}" for each in found if not each.is_met]
    return "; ".join(told) + "".join(missed)


def capacity_summary(capacity: Capacity) -> str:
    """Return the capacity in one line."""
    return (
        f"{capacity.requests_per_s:.1f} requests/s, {capacity.tokens_per_s:.0f} uncached tokens/s, hit ratio "
        f"{capacity.hit_ratio:.2f}, {100 * capacity.busy:.0f} % busy"
    )


def as_json(records: Sequence[Record], command: str, machine: Mapping[str, str]) -> str:
    """Return the record beside the page: every run without its bins and views, with its verdicts."""
    told = {
        "command": command,
        **{name: machine[name] for name in ("date", "commit", "python")},
        "runs": [_told(record) for record in in_order(records)],
    }
    return json.dumps(told, indent=1) + "\n"


def _told(record: Record) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(record)
    del told["bins"], told["views"]
    told["aims"] = [
        {"aim": each.aim, "measured": each.measured, "met": each.is_met} for each in verdicts(record)
    ]
    told["outcomes"] = {name: whole(record).count(name) for name in OUTCOMES}
    return told


_PROCEDURE: Final = (
    "Each run has fresh regions in containers, on a network each, and a link between the networks. They start "
    "together, and each observes the others as HEALTHY before the load. Clients outside all regions know all "
    "frontends. Conversations of six turns arrive at random times at each region. They have a "
    "quarter of the deviation of a Poisson process, because a region here has three requests per second. Each turn "
    "repeats all before it, and every token is compared with the engine's arithmetic. 15 % of them belong to a lower "
    "priority class, and 5 % to tenants that only their home region may serve. The aims about users leave the latter "
    "out. At the planned load the clients have their defaults. At 60 % and in the surge they hand each refusal to "
    "their caller. Attempts per request are those that the answer explains, and one for each further send of the "
    "client. Capacity is that of prefill, in prompt tokens per second that are not in the cache. A run on a saturated"
    " machine is rejected and made again."
)


def _about(records: Sequence[Record], command: str, machine: Mapping[str, str]) -> str:
    capacities = dict.fromkeys(capacity_summary(each.capacity) for each in records)
    loads = dict.fromkeys(
        f"{100 * each.utilisation:.0f} % ({len(each.regions)} regions)"
        for each in records
        if each.load == PLAN
    )
    return (
        f"Written by `{command}`, {machine['date']}. Commits: {_distinct(each.commit for each in records)}. "
        f"Machines: {_distinct(each.cpu for each in records)}. One region of 1 + 1 alone: {'; '.join(capacities)}. "
        f"Planned load: {', '.join(loads) or '-'}."
    )


def _aim_rows(record: Record) -> list[tuple[str, ...]]:
    return [
        (*_name(record), each.aim, each.measured, "yes" if each.is_met else "**no**")
        for each in verdicts(record)
    ]


def _name(record: Record) -> tuple[str, ...]:
    return record.event, record.load, str(len(record.regions)), str(record.number)


def _figures(record: Record) -> tuple[str, ...]:
    window, before = whole(record), steady(record, kinds=FREE)
    free = whole(record, kinds=FREE)
    after = Window(record.bins, record.times.healed_s, record.times.ended_s, kinds=FREE)
    return (
        *_name(record),
        str(window.sent),
        _percent(free.share(GOOD)),
        _percent(free.share(REFUSED)),
        str(free.count(BARE, FAILED, CUT)),
        str(free.total("resumes")),
        f"{window.total('attempts') / max(window.sent, 1):.3f}",
        _whole(before.ttft_ms()),
        _whole(fault(record, kinds=FREE).ttft_ms()),
        _whole(after.ttft_ms()),
        f"{record.capacity.hit_ratio:.2f}",
        f"{100 * record.busy:.0f}",
        f"{record.late_s:.2f}",
    )


def _planned(records: Sequence[Record]) -> list[str]:
    """Compare the utilisation of `kvmesh region plan` with the loads at which the loss of a region was carried."""
    rows = []
    for count in sorted({len(each.regions) for each in records}):
        lost = [each for each in records if BY_NAME[each.event].moves and len(each.regions) == count]
        plans = [each for each in lost if each.load == PLAN]
        survived = [each for each in lost if is_survived(each)]
        if not lost:
            continue
        kept = [each for each in plans if is_survived(each)]
        rows.append(
            (
                str(count),
                f"{plans[0].utilisation:.2f}" if plans else "-",
                f"{len(kept)} of {len(plans)} runs",
                f"{max(each.utilisation for each in survived):.2f}" if survived else "-",
            )
        )
    about = (
        "A load is survivable if the loss of a region leaves at least 99.5 % of the requests good from 5 s on. The last "
        "column is the highest load of all runs that was: its distance from the plan is what the plan leaves unused."
    )
    return [*pages.table(PLANNED_HEAD, rows, "rrrr"), "", *pages.paragraph(about)] if rows else []


def is_survived(record: Record) -> bool:
    """True if the regions that are left carried the load."""
    return aims.good_after_5_s(record).is_met


def _shown(records: Sequence[Record], pictures: Mapping[Key, str]) -> list[str]:
    made: list[str] = []
    for record in records:
        if record.key in pictures:
            title = f"{BY_NAME[record.event].title}, load {record.load}, {len(record.regions)} regions"
            made += [f"![{title}]({pictures[record.key]})", ""]
    return made[:-1]


def _doubts(records: Iterable[Record]) -> list[str]:
    found = list(records)
    lines = pages.items(f"{'-'.join(_name(each))}: {problem}." for each in found for problem in each.problems)
    for each in found:
        for note in each.notes:
            lines += ["", f"{'-'.join(_name(each))}, in the words of the mesh:", "", "```text"]
            lines += [*textwrap.wrap(note, pages.WIDTH), "```"]
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
