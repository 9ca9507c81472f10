"""The table of runs in docs/measurements/rollouts.md. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bench import pages
from bench.rollouts.cases import BY_NAME, Case
from bench.rollouts.records import Record

BEGIN: Final = "<!-- runs: written by `python -m bench.rollouts run`. -->"
END: Final = "<!-- runs: end. -->"
P95_RATIO_MAX: Final = 1.05

HEAD: Final = (
    *("version", "as wanted", "ended", "step, %", "gates or reason"),
    *("fault to weight 0, s", "arrived meanwhile", "bad answers (bound)", "hit ratio"),
)


def lines(records: Sequence[Record], command: str, machine: Mapping[str, str]) -> list[str]:
    """Return the section's lines."""
    about = (
        f"Written by `{command}`, {machine['date']}. Commits: {_distinct(each.commit for each in records)}. "
        f"Processors: {_distinct(each.cpu for each in records)}. "
        "Each run has a fresh mesh: three pools of a router, a prefill and a decode replica. There "
        "are two frontends and one control process. Conversations of one to three turns with one system "
        f"prompt arrive at {_rate(records)} sessions per second. Steps are 10, 50 and 100 %, the bake time 60 s to 300 s. "
        "A bad answer has an error, a wrong token, or no token for 10 s. Its bound is 1.2 x weight x the requests that "
        "arrived meanwhile: from the begin of the fault to weight 0 at both frontends. Cells have the median and the "
        "extremes."
    )
    body = [*pages.paragraph(about), "", *table(records), ""]
    body += [
        line for told in (_ttft(records), _hang(records), _doubts(records)) if told for line in (*told, "")
    ]
    return ["", *body]


def table(records: Sequence[Record]) -> list[str]:
    """Return one row per case."""
    rows = [_row(case, [each for each in records if each.case == case.name]) for case in BY_NAME.values()]
    return pages.table(HEAD, [row for row in rows if row], "lllrlrrrr")


def summary(record: Record) -> str:
    """Return one run in one line."""
    told = [
        "as wanted" if record.is_as_wanted else "NOT as wanted",
        f"{record.state} at {record.weight_percent} % after {record.rollout_s:.0f} s",
        record.gate or _short(record.reason),
        f"{record.turns} turns, hit ratio {record.hit_ratio or 0:.2f}, {record.busy_percent:.0f} % busy",
    ]
    if record.back_s is not None:
        told.append(f"weight 0 after {record.back_s:.1f} s, bad {record.bad} of at most {record.bound:.1f}")
    if record.hang_s is not None:
        told.append(f"{record.hang_s:.1f} s from the tenth open request")
    told += [f"{ratio:.3f} x the p95 TTFT without a rollout" for ratio in p95_ratios([record])]
    if record.bad_outside:
        told.append(f"{record.bad_outside} bad answers without a fault")
    return "; ".join([*told, *record.problems])


def p95_ratios(records: Iterable[Record]) -> list[float]:
    """Return p95 of TTFT during the rollout over that without one, of each run that compared."""
    return [
        each.ttft_p95_s / each.quiet_p95_s
        for each in records
        if each.ttft_p95_s is not None and each.quiet_p95_s
    ]


def _row(case: Case, records: Sequence[Record]) -> tuple[str, ...]:
    if not records:
        return ()
    bad = [f"{each.bad} ({each.bound:.0f})" for each in records] if case.is_faulty else []
    outside = sum(each.bad_outside for each in records)
    return (
        case.title,
        f"{sum(each.is_as_wanted for each in records)} of {len(records)}",
        _distinct(each.state.lower().replace("_", " ") for each in records),
        _distinct(str(each.weight_percent) for each in records),
        _distinct(each.gate.replace(", ", " and ") or _short(each.reason) for each in records),
        pages.spread((each.back_s for each in records), 1),
        pages.spread((float(each.arrived) for each in records if case.is_faulty), 0),
        ", ".join(bad) or str(outside),
        pages.spread((each.hit_ratio for each in records), 2),
    )


def _ttft(records: Sequence[Record]) -> list[str]:
    ratios = p95_ratios(records)
    if not ratios:
        return []
    compared = [each for each in records if each.quiet_p95_s]
    quiet = pages.spread((1000 * each.quiet_p95_s for each in compared if each.quiet_p95_s), 0)
    during = pages.spread((1000 * each.ttft_p95_s for each in compared if each.ttft_p95_s), 0)
    told = (
        f"Users' p95 TTFT with the good version: {during} ms during the rollout, {quiet} ms without one. Each run "
        "compares on its own mesh: the rollout, and the time before and behind it. "
        f"Ratio: {pages.spread(ratios, 3)}; aim: at most {P95_RATIO_MAX:g}."
    )
    return pages.paragraph(told)


def _hang(records: Sequence[Record]) -> list[str]:
    found = [each.hang_s for each in records if BY_NAME[each.case].is_hang]
    if not found:
        return []
    told = f"Hang: {pages.spread(found, 1)} s from the tenth open request to weight 0; aim: at most 30 s."
    return pages.paragraph(told)


def _doubts(records: Sequence[Record]) -> list[str]:
    return pages.items(
        f"{each.case}, run {each.run}: {problem}." for each in records for problem in each.problems
    )


def _rate(records: Sequence[Record]) -> str:
    return _distinct(f"{each.sessions_per_s:g}" for each in records)


def _distinct(texts: Iterable[str]) -> str:
    """Return each text once, with its number where they differ."""
    counted: dict[str, int] = {}
    for text in texts:
        counted[text] = counted.get(text, 0) + 1
    if len(counted) == 1:
        return next(iter(counted))
    return "; ".join(f"{text} in {number}" for text, number in counted.items())


def _short(reason: str) -> str:
    words = reason.replace("|", "/")
    return words if len(words) <= 80 else words[:77] + "..."
