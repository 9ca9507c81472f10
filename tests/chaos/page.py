"""docs/measurements/faults.md, made from the records of a matrix and of a soak. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from bench import pages
from tests.chaos.cells import Cell, everything
from tests.chaos.records import Record, median
from tests.chaos.slopes import FLAT, GROWS, MINUTES_OF_A_DAY, NOT_JUDGED, Slope
from tests.chaos.soak_record import SoakRecord

READMITTED_S: Final = 2.0
"""What a returned part is allowed until it serves."""

COLUMNS: Final = (
    *(
        "cell",
        "runs",
        "streams",
        "in flight",
        "**lost**",
        "cancelled",
        "over deadline",
        "excused",
        "adopted",
        "resumed",
    ),
    *("client went on", "recomputed tokens", "longest pause, s", "first served, s", "violations"),
)

SLOPE_COLUMNS: Final = (
    *("process", "lives", "watched, s", "first, MB", "median, MB", "last, MB", "slope, MB/min"),
    *("bound, MB/day", "memory", "over time"),
)

LEGEND: Final = """\
Each run breaks one process of a mesh of 2 frontends, 2 routers, 2 prefill and 2 decode replicas, their 4 engines
(hashed arithmetic, 45 ms a step) and Redis, each in its own container, under 16 to 64 streams: prompts of 20 to 1,500
tokens, 20 to 260 tokens of output, 40 % greedy and the rest sampled, 15 % cancelled by their clients at a random
moment, 10 % with a deadline of 0.5 to 8 s; most are under way when the fault comes, others arrive while it lasts and
when it is over. One in five clients is plain gRPC, the others use `kvmesh.client`. A killed or terminated process is
started again 2 s after its end; a pause (cgroup freezer), a cut (all packets of the container dropped, both ways,
silently), a cut link (those between one prefill engine and one decode engine) and a slow spell (50 ms and 2 % loss,
each way) last 10 s. A duplicate is a second process with the name of the part, started beside it and killed after 10 s;
the part must serve again within 5 s. Every token is compared with a calculation
without a server, also those of streams that ended early.

- **lost**: streams that ended with an error other than their client's own deadline, or not at all. A client that is asked
  to come back in a second and has less than that left counts as **over deadline**.
- **excused**: plain clients of the very frontend that was hit, while it was away. They get UNAVAILABLE, after a kill
  within a second, and are meant to. A slow frontend excuses nothing, and one that drains only what it refuses.
- **adopted**: running attempts taken over through another router or connection; nothing is computed again.
  **resumed**: attempts that a frontend started behind the tokens that were out. **client went on**: streams that
  `kvmesh.client` took to another frontend. Counted from the streams that completed.
- **longest pause**: the longest time a stream waited for its next message, from the fault on; median and largest of
  the runs.
- **first served**: from the moment the part answers health again to the first token of the first request it served;
  for Redis, until all processes are registered and connected again. Median and largest of the runs. Requests for this
  are sent 4 at once, and up to 32 where other replicas serve them.
- **violations**: broken invariants of any kind: a wrong, repeated or missing token, a hang, silence beyond the
  watchdogs, an error nobody can act on, engine blocks, reservations, handoffs, slots, tasks, file descriptors, memory
  or Redis keys left behind, retries beyond their budget, work tried again more than once on average, tokens charged
  twice or not at all (where no frontend and no Redis ended), a process that restarted by itself or does not
  serve again."""


def page(records: Sequence[Record], soak: SoakRecord | None, command: str, old: str = "") -> str:
    """Return the page as Markdown. `old`: the page that it replaces, whose hand-written end is kept."""
    lines = [
        "# Faults",
        "",
        "**Question.** What do clients see when a process of the mesh dies, hangs or is cut off?",
        "",
    ]
    if records:
        lines += [*_about(records, command), "", *_verdict(records), "", *_table(records), "", LEGEND, ""]
        lines += _violations(records)
    if soak is not None:
        lines += soak_section(soak)
    return pages.with_notes(lines, old)


def _about(records: Sequence[Record], command: str) -> list[str]:
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    machines = "; ".join(dict.fromkeys(record.machine for record in records))
    first, last = min(record.began for record in records), max(record.began for record in records)
    minutes = sum(record.seconds for record in records) / 60
    seeds = [record.seed for record in records]
    busy = [record.cpu_share for record in records if record.streams]
    return [
        _prose(
            f"**Command.** `{command}`: {len(records)} runs in {minutes:.0f} minutes, seeds {min(seeds)} to {max(seeds)}.",
            "Every run: [faults.jsonl](faults.jsonl). One of them again: `make chaos ONLY=prefill:kill SEED=3`.",
        ),
        "",
        _prose(
            f"**Where.** {machines}; {_moment(first)} to {_moment(last)} UTC; commit {commits}.",
            f"Cores busy while streams ran: {_percent(median(busy) or 0)} (median), at most",
            f"{_percent(max(busy, default=0))}; clients, mesh and engines share them. The machine woke the clients",
            f"up to {max(record.runner_late_s for record in records):.2f} s late; limits on times are that much wider",
            f"in that run.{_means(records)}",
        ),
    ]


def _means(records: Sequence[Record]) -> str:
    known = {"netem": "netem", "queue": "a queue in user space, as this kernel has no netem"}
    means = [known.get(mean, mean) for mean in dict.fromkeys(record.means for record in records) if mean]
    return f" Slow parts were slowed by {' and '.join(means)}." if means else ""


def _verdict(records: Sequence[Record]) -> list[str]:
    bad = sum(bool(record.violations) for record in records)
    served = [record.first_served_s for record in records if record.first_served_s is not None]
    quick = sum(seconds <= READMITTED_S for seconds in served)
    return [
        _prose(
            f"**Result.** {_sum(records, 'streams'):,} streams, {_sum(records, 'in_flight'):,} of them in flight when the",
            f"fault came, {_sum(records, 'output_tokens'):,} tokens compared: **{_sum(records, 'lost')} lost**;",
            f"violations in {bad} of {len(records)} runs. The returned part served within {READMITTED_S:g} s in",
            f"{quick} of {len(records)} runs.",
        )
    ]


def _table(records: Sequence[Record]) -> list[str]:
    rows = []
    for cell in everything():
        ones = [record for record in records if (record.part, record.fault) == (cell.part, cell.fault)]
        if ones:
            rows.append(row(cell, ones))
    return pages.table(COLUMNS, rows, "lr")


def row(cell: Cell, records: Sequence[Record]) -> list[str]:
    """Return the cells of one row, in the order of COLUMNS. `records`: one or more runs of `cell`."""
    return [
        str(cell).replace(":", ", "),
        str(len(records)),
        *(
            f"{_sum(records, name):,}"
            for name in (
                *("streams", "in_flight", "lost", "cancelled", "deadlined", "excused", "adopted", "resumed"),
                *("client_resumes", "recomputed_tokens"),
            )
        ),
        _spread(records, lambda record: record.longest_pause_s),
        _spread(records, lambda record: record.first_served_s),
        str(sum(len(record.violations) for record in records)),
    ]


def _violations(records: Iterable[Record]) -> list[str]:
    bad = [record for record in records if record.violations]
    if not bad:
        return []
    lines = ["## Violations", ""]
    for record in bad:
        lines.append(
            f"- `make chaos ONLY={record.part}:{record.fault} SEED={record.seed}` ({record.target}):"
        )
        lines += [f"  - {violation}" for violation in record.violations[:5]]
        if len(record.violations) > 5:
            lines.append(f"  - and {len(record.violations) - 5} more")
    return [*lines, ""]


def soak_section(soak: SoakRecord) -> list[str]:
    """Return the lines of the page that tell of a soak."""
    flat, grows, unknown = (
        sum(slope.verdict == verdict for slope in soak.slopes) for verdict in (FLAT, GROWS, NOT_JUDGED)
    )
    watch = soak.watch
    ending = (
        ""
        if watch.ends_share == 1
        else f" Parts are ended in the first {_percent(watch.ends_share)} of the time only."
    )
    return [
        "## Soak",
        "",
        _prose(
            f"**Command.** `make soak MINUTES={soak.minutes:g}`: seed {soak.seed}; {soak.machine};",
            f"{_moment(soak.began)} UTC; commit {soak.commit}.",
        ),
        "",
        _prose(
            f"**How.** {soak.requests_per_s:.2f} requests/s, {_percent(soak.load)} of the {soak.capacity_per_s:.2f}",
            f"requests/s that this mesh finished on this machine without faults ({soak.capacity_how}).",
            f"{len(soak.faults)} faults, one every {soak.every_s:g} s, each drawn from all cells of the matrix.{ending}",
            f"Cores busy: {_percent(soak.cpu_share)}.",
        ),
        "",
        _prose(
            f"**Result.** {soak.streams:,} streams, {soak.output_tokens:,} tokens compared: **{soak.lost} lost**,",
            f"{len(soak.violations)} violations. Adopted {soak.adopted:,}, resumed {soak.resumed:,}, clients went on",
            f"{soak.client_resumes:,}, recomputed tokens {soak.recomputed_tokens:,}, longest pause",
            f"{soak.longest_pause_s:.1f} s. Memory flat in {flat} of {len(soak.slopes)} processes, growing in {grows},",
            f"not judged in {unknown}{_unjudged(soak)}.",
        ),
        "",
        _prose(
            "Resident memory of each process, sampled every 5 s. The slope is the median over pairs of samples of the",
            f"same life of the process, {_span(watch.apart_s)} s apart, without the first {watch.warm_s:g} s of each life",
            f"({watch.engine_warm_s:g} s of an engine's): imports, caches, block tables and records of ended streams fill",
            f"then. Flat: at most {watch.slope_max:.3g} MB/min, or growth by at most {_percent(soak.share_max)} over the",
            "time watched. What that excludes is a leak faster than the bound in the table, in MB a day; a slower one",
            "cannot be told from noise in these minutes and may be there. A process whose lives were too short to tell",
            "is not judged; replicas run the same program, so one of each kind must be.",
        ),
        "",
        *pages.table(SLOPE_COLUMNS, map(_slope_row, soak.slopes), "lrrrrrrrl"),
        "",
        *pages.items(map(str, soak.violations)),
        *pages.items(
            f"at {death.at_s:.0f} s {death.part} ended by itself with status {death.status} and was started again"
            for death in soak.deaths
        ),
        "",
    ]


def _span(apart_s: tuple[float, float]) -> str:
    return f"{apart_s[0]:g} to {apart_s[1]:g}"


def _unjudged(soak: SoakRecord) -> str:
    return f" (of no {', no '.join(soak.unjudged)} at all)" if soak.unjudged else ""


def _slope_row(slope: Slope) -> list[str]:
    is_judged = slope.verdict != NOT_JUDGED
    per_min = "-" if slope.mb_per_min is None else f"{slope.mb_per_min:+.2f}"
    bound = f"{slope.bound_mb_per_min * MINUTES_OF_A_DAY:.0f}" if is_judged else "-"
    sizes = (f"{size:.0f}" for size in (slope.first_mb, slope.median_mb, slope.last_mb))
    verdict = slope.verdict if slope.verdict == FLAT else f"**{slope.verdict}**"
    watched = (slope.process, str(slope.lives), f"{slope.watched_s:.0f}")
    return [*watched, *sizes, per_min, bound, verdict, f"`{slope.line}`"]


def _prose(*parts: str) -> str:
    return " ".join(parts)


def _moment(began: str) -> str:
    return began[:16].replace("T", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _sum(records: Iterable[Record], name: str) -> int:
    return sum(int(getattr(record, name)) for record in records)


def _spread(records: Sequence[Record], value: Callable[[Record], float | None]) -> str:
    values = [number for number in map(value, records) if number is not None]
    middle = median(values)
    if middle is None:
        return "never"
    missing = len(records) - len(values)
    return f"{middle:.2f} / {max(values):.2f}" + (f" ({missing} never)" if missing else "")
