"""The page docs/measurements/regions.md and its record. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from bench import pages
from tests.gameday.calls import GOOD
from tests.gameday.events import BY_NAME, PLAN
from tests.gameday.records import Capacity, Key, Record
from tests.gameday.results import Result, in_order, percent, result_of
from tests.gameday.verdicts import FREE, SETTLE_S, fault, whole

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
    results: Iterable[Result], command: str, machine: Mapping[str, str], pictures: Mapping[Key, str]
) -> list[str]:
    """Return the page's lines. `pictures`: the file of each drawn run."""
    return ["# Regions", "", *lines(results, command, machine, pictures)]


def lines(
    results: Iterable[Result], command: str, machine: Mapping[str, str], pictures: Mapping[Key, str]
) -> list[str]:
    """Return the page's lines behind its title."""
    ordered = in_order(results)
    total, missed = sum(len(each.aims) for each in ordered), misses(ordered)
    made = [*pages.paragraph(_about(ordered, command, machine)), "", *pages.paragraph(_PROCEDURE), ""]
    made += [*pages.paragraph(f"{total - missed} of {total} aims are met."), ""]
    made += pages.section(
        "Aims", pages.table(HEAD, [row for each in ordered for row in _aim_rows(each)], "llrrlll")
    )
    figures = [(*_name(each), *each.figures) for each in ordered]
    made += pages.section("Figures", pages.table(FIGURES_HEAD, figures, "llrrr"))
    made += pages.section("The planned load", _planned(ordered))
    made += pages.section("Over time", _shown(ordered, pictures))
    return made + pages.section("Doubts", _doubts(ordered))


def misses(results: Iterable[Result]) -> int:
    """Return the number of missed aims."""
    return sum(not aim.met for each in results for aim in each.aims)


def drawn(records: Iterable[Record]) -> list[Record]:
    """Return the runs that are drawn: the first one of each known event, load and number of regions."""
    return [record for record in records if record.number == 1 and record.event in BY_NAME]


def summary(record: Record) -> str:
    """Return one run in one line, and a line for each missed aim."""
    found = result_of(record).aims
    met = sum(each.met for each in found)
    told = [
        f"{met} of {len(found)} aims met",
        f"{whole(record).sent} requests",
        f"{percent(fault(record, SETTLE_S, kinds=FREE).share(GOOD))} % good after 5 s",
        f"{100 * record.busy:.0f} % busy",
        f"{record.late_s:.2f} s late",
        *record.problems,
        *record.notes,
    ]
    missed = [f"\n  MISSED {each.aim}: {each.measured}" for each in found if not each.met]
    return "; ".join(told) + "".join(missed)


def capacity_summary(capacity: Capacity) -> str:
    """Return the capacity in one line."""
    return (
        f"{capacity.requests_per_s:.1f} requests/s, {capacity.tokens_per_s:.0f} uncached tokens/s, hit ratio "
        f"{capacity.hit_ratio:.2f}, {100 * capacity.busy:.0f} % busy"
    )


def as_json(results: Iterable[Result], command: str, machine: Mapping[str, str]) -> str:
    """Return the record beside the page: every result."""
    told = {
        "command": command,
        **{name: machine[name] for name in ("date", "commit", "python")},
        "runs": [msgspec.to_builtins(each) for each in in_order(results)],
    }
    return json.dumps(told, indent=1) + "\n"


def results_in(text: str) -> list[Result]:
    """Return the results in the record beside a page. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=_Told).runs


class _Told(msgspec.Struct):
    runs: list[Result]


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


def _about(results: Sequence[Result], command: str, machine: Mapping[str, str]) -> str:
    machines = dict.fromkeys(f"Machine: {each.cpu}." for each in results)
    capacities = dict.fromkeys(
        f"One region of 1 + 1 alone: {capacity_summary(each.capacity)}." for each in results
    )
    loads = dict.fromkeys(
        f"{100 * each.utilisation:.0f} % ({len(each.regions)} regions)"
        for each in results
        if each.load == PLAN
    )
    return (
        f"Written by `{command}`, {machine['date']}. Commits: {_distinct(each.commit for each in results)}. "
        f"{' '.join(machines)} {' '.join(capacities)} "
        f"Planned load: {', '.join(loads) or '-'}."
    )


def _aim_rows(result: Result) -> list[tuple[str, ...]]:
    return [
        (*_name(result), each.aim, each.measured, "yes" if each.met else "**no**") for each in result.aims
    ]


def _name(result: Result) -> tuple[str, ...]:
    return result.event, result.load, str(len(result.regions)), str(result.number)


def _planned(results: Sequence[Result]) -> list[str]:
    """Compare the utilisation of `kvmesh region plan` with the loads at which the loss of a region was carried."""
    rows = []
    for count in sorted({len(each.regions) for each in results}):
        lost = [each for each in results if BY_NAME[each.event].moves and len(each.regions) == count]
        plans = [each for each in lost if each.load == PLAN]
        survived = [each for each in lost if each.is_survived]
        if not lost:
            continue
        kept = [each for each in plans if each.is_survived]
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
        "column is the highest load of all runs that was: its distance from the plan is what the plan leaves unused. "
        "The plan is for equal regions of one model version, so the events kill and isolate count."
    )
    return [*pages.table(PLANNED_HEAD, rows, "rrrr"), "", *pages.paragraph(about)] if rows else []


def _shown(results: Sequence[Result], pictures: Mapping[Key, str]) -> list[str]:
    made: list[str] = []
    for each in results:
        if each.key in pictures:
            title = f"{BY_NAME[each.event].title}, load {each.load}, {len(each.regions)} regions"
            made += [f"![{title}]({pictures[each.key]})", ""]
    return made[:-1]


def _doubts(results: Sequence[Result]) -> list[str]:
    lines = pages.items(
        f"{'-'.join(_name(each))}: {problem}." for each in results for problem in each.problems
    )
    for each in results:
        for note in each.notes:
            lines += ["", f"{'-'.join(_name(each))}, in the words of the mesh:", "", "```text"]
            lines += [*textwrap.wrap(note, pages.WIDTH), "```"]
    return lines


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
