"""Renders the section of docs/measurements/faults.md about faults in regions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import pages
from tests.chaos.region_record import RegionRecord

COLUMNS: Final = (
    *("cell", "seed", "streams", "in flight", "**lost**", "refused", "resumed", "served during the fault"),
    *("longest stream, s", "CPU, %", "violations"),
)


def region_section(records: Sequence[RegionRecord]) -> list[str]:
    """Return the lines of the page about faults in regions; none without records."""
    if not records:
        return []
    bad = sum(bool(record.violations) for record in records)
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    seconds = sum(record.seconds for record in records)
    streams, tokens, lost = (
        sum(int(getattr(record, name)) for record in records) for name in ("streams", "tokens", "lost")
    )
    about = (
        f"**Command.** `make chaos`, or `make chaos ONLY=region:kill`: {len(records)} runs in {seconds / 60:.1f} minutes; "
        f"{records[0].machine}; {records[0].began[:16].replace('T', ' ')} UTC; commit {commits}."
    )
    how = (
        "**How.** Two regions of 1 + 1 in containers, and clients outside of them that know both. Conversations load each "
        "region to a third of its capacity. A cut loses all packets of a region. A slow link delays each packet between "
        "the regions by 80 ms and loses 1 % of them. `region-redis` is the Redis of one region. Streams of tenants that "
        "only one region may serve can be lost with it; they are not counted as lost. Refusals have RetryInfo."
    )
    result = f"**Result.** {streams:,} streams, {tokens:,} tokens compared: **{lost} lost**; violations in {bad} runs."
    lines = [line for text in (about, how, result) for line in (*pages.paragraph(text), "")]
    return ["## Regions", "", *lines, *pages.table(COLUMNS, map(_row, records), "lrrrrrrlrrr"), ""]


def _row(record: RegionRecord) -> tuple[str, ...]:
    served = ", ".join(f"{region} {count}" for region, count in sorted(record.served.items()))
    return (
        f"{record.part}:{record.fault}",
        str(record.seed),
        str(record.streams),
        str(record.in_flight),
        str(record.lost),
        str(record.refused),
        str(record.resumed),
        served or "-",
        f"{record.longest_s:.1f}",
        f"{100 * record.cpu_share:.0f}",
        str(len(record.violations)) if record.violations else "-",
    )
