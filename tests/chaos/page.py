"""Renders docs/measurements/faults.md from the records of a fault matrix and of a soak. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from bench import pages
from tests.chaos.cells import Cell, everything
from tests.chaos.cold_page import cold_section
from tests.chaos.records import Record, median
from tests.chaos.region_page import region_section
from tests.chaos.region_record import RegionRecord
from tests.chaos.slopes import FLAT, GROWS, MINUTES_OF_A_DAY, NOT_JUDGED, Slope
from tests.chaos.soak_record import SoakRecord
from tests.chaos.without_page import without_section
from tests.chaos.without_record import WithoutRecord

READMITTED_S: Final = 2.0
"""Longest time until a returned part serves again."""

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
        "taken over",
        "resumed",
    ),
    *("client resumed", "recomputed tokens", "longest pause, s", "first served, s", "violations"),
)

SLOPE_COLUMNS: Final = (
    *("process", "lives", "watched, s", "first, MB", "median, MB", "last, MB", "slope, MB/min"),
    *("bound, MB/day", "memory", "over time"),
)

LEGEND: Final = """\
Each run breaks one process of a mesh under load. The mesh has 2 frontends, 2 routers, 2 prefill and 2 decode replicas,
their 4 engines, Redis and 2 control processes. A rollout is under way: the pool `next`, with 1 router, 1 prefill and 1
decode replica, has 20 % of the requests. No fault hits `next`. Each process has its own container. The engines run
hashed arithmetic with 45 ms a step. The load is 16 to 64 streams with prompts of 20 to 1,500 tokens and 20 to 260
tokens of output. 40 % of them are greedy, the rest sampled. Clients cancel 15 % at a random moment; 10 % have a
deadline of 0.5 to 8 s. Most are under way when the fault comes, others arrive during the fault and after it. One in
five clients is plain gRPC, the others use `kvmesh.client`.

A killed or terminated process is started again 2 s after its end. All other faults last 10 s:

- pause: the cgroup freezer stops the container;
- cut: all packets of the container are dropped, both ways, silently;
- link: the packets between one prefill engine and one decode engine are dropped;
- slow: 50 ms of delay and 2 % loss, each way;
- duplicate: a second process with the name of the part runs beside it and is then killed. The part must serve again
  within 5 s.

Every token is compared with a calculation without a server, also those of streams that ended early.

- **lost**: streams that ended with an error other than their client's own deadline, or did not end. A refusal with
  RetryInfo of a second counts as **over deadline** if the client has less than that left.
- **excused**: plain clients of the frontend that was hit, while it was unavailable. They get UNAVAILABLE by design,
  after a kill within a second. A slow frontend excuses no client. A draining one excuses only the clients that it
  refuses.
- **taken over**: running attempts that continued through another router or connection (stream takeover); no token is
  computed again.
- **resumed**: attempts that a frontend started behind the tokens already sent.
- **client resumed**: streams that `kvmesh.client` continued at another frontend. This count and the two before are of
  completed streams.
- **longest pause**: the longest wait of a stream for its next message, from the fault on; median and largest of the
  runs.
- **first served**: the time until the part serves again. It begins when the part answers health and ends with the first
  token of the first request that it served. For Redis it ends when all processes are registered and connected. For
  the control plane it ends when one process leads, and all receivers are connected to it and have its snapshot. Median and
  largest of the runs. The probing requests are sent 4 at once, and up to 32 where other replicas serve them.
- **violations**: broken invariants of any kind:
  - a wrong, repeated or missing token; a hang; no progress beyond the watchdogs; an error without a remedy;
  - engine blocks, reservations, handoffs, slots, tasks, file descriptors, memory or Redis keys left behind;
  - retries beyond their budget, or work tried again more than once on average;
  - tokens charged twice or not at all (where no frontend and no Redis ended);
  - a rollout that was taken back or has another weight, or receivers with different snapshots;
  - a process that restarted by itself or does not serve again."""


def page(
    records: Sequence[Record],
    soak: SoakRecord | None,
    command: str,
    old: str = "",
    without: WithoutRecord | None = None,
    colds: Sequence[Record] = (),
    regions: Sequence[RegionRecord] = (),
) -> str:
    """Return the page as Markdown. `old`: the page that it replaces; its hand-written end is kept."""
    lines = [
        "# Faults",
        "",
        "**Question.** How does the failure of a process, by death, hang or partition, look to clients?",
        "",
    ]
    if records:
        lines += [*_about(records, command), "", *_verdict(records), "", *_table(records), "", LEGEND, ""]
        lines += _violations(records)
    lines += cold_section(colds)
    lines += region_section(regions)
    if without is not None:
        lines += without_section(without)
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
            "Every run: [faults.jsonl](faults.jsonl). `make chaos ONLY=prefill:kill SEED=3` repeats one of them.",
        ),
        "",
        _prose(
            f"**Where.** {machines}; {_moment(first)} to {_moment(last)} UTC; commit {commits}.",
            f"Busy cores while streams ran: {_percent(median(busy) or 0)} (median), at most",
            f"{_percent(max(busy, default=0))}; clients, mesh and engines share them. The machine woke the clients",
            f"up to {max(record.runner_late_s for record in records):.2f} s late; limits on times are that much wider",
            f"in that run.{_means(records)}",
        ),
    ]


def _means(records: Sequence[Record]) -> str:
    known = {"netem": "netem", "queue": "a queue in user space, as this kernel has no netem"}
    means = [known.get(mean, mean) for mean in dict.fromkeys(record.means for record in records) if mean]
    return f" Slow parts were slowed with {' and '.join(means)}." if means else ""


def _verdict(records: Sequence[Record]) -> list[str]:
    bad = sum(bool(record.violations) for record in records)
    served = [record.first_served_s for record in records if record.first_served_s is not None]
    quick = sum(seconds <= READMITTED_S for seconds in served)
    return [
        _prose(
            f"**Result.** {_sum(records, 'streams'):,} streams, {_sum(records, 'in_flight'):,} of them in flight when the",
            f"fault came. {_sum(records, 'output_tokens'):,} tokens were compared. **{_sum(records, 'lost')} lost**;",
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
                *(
                    "streams",
                    "in_flight",
                    "lost",
                    "cancelled",
                    "deadlined",
                    "excused",
                    "takeovers",
                    "resumed",
                ),
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
    """Return the lines of the page about a soak."""
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
            f"**How.** The load is {soak.requests_per_s:.2f} requests/s, {_percent(soak.load)} of the capacity without",
            f"faults. The capacity on this machine is {soak.capacity_per_s:.2f} requests/s ({soak.capacity_how}).",
            f"{len(soak.faults)} faults, one every {soak.every_s:g} s, each drawn from all cells of the matrix.{ending}",
            f"Busy cores: {_percent(soak.cpu_share)}.",
        ),
        "",
        _prose(
            f"**Result.** {soak.streams:,} streams, {soak.output_tokens:,} tokens compared: **{soak.lost} lost**,",
            f"{len(soak.violations)} violations. Taken over {soak.takeovers:,}, resumed {soak.resumed:,}, resumed by",
            f"clients {soak.client_resumes:,}, recomputed tokens {soak.recomputed_tokens:,}, longest pause",
            f"{soak.longest_pause_s:.1f} s. Memory flat in {flat} of {len(soak.slopes)} processes, growing in {grows},",
            f"not judged in {unknown}{_unjudged(soak)}.",
        ),
        "",
        _prose(
            "Resident memory of each process, sampled every 5 s. The slope is the median over pairs of samples of the",
            f"same life of the process, {_span(watch.apart_s)} s apart. The first {watch.warm_s:g} s of each life do not",
            f"count ({watch.engine_warm_s:g} s of an engine's). Imports, caches, block tables and records of ended",
            f"streams fill then. Flat means at most {watch.slope_max:.3g} MB/min, or growth by at most",
            f"{_percent(soak.share_max)} over the time watched. That excludes a leak faster than the bound in the table,",
            "in MB a day. A slower leak cannot be told from noise in these minutes and may exist. A process with too",
            "short lives is not judged. Replicas run the same program, so one of each kind must be judged.",
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
