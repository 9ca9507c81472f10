"""Renders the section of docs/measurements/faults.md about cold engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import pages
from tests.chaos.records import ColdReturn, Record

COLUMNS: Final = (
    *("cell", "seed", "streams", "in flight", "**lost**", "resumed", "boot, s", "in service, s", "in use, s"),
    *("starting / warming / seeding / probing, s", "violations"),
)
STATES: Final = ("starting", "warming", "seeding", "probing")


def cold_section(records: Sequence[Record]) -> list[str]:
    """Return the lines of the page about faults of cold engines; none without records."""
    colds = [record.cold for record in records if isinstance(record.cold, ColdReturn)]
    if not records:
        return []
    bound_s = max((cold.bound_s for cold in colds), default=0.0)
    bad = sum(bool(record.violations) for record in records)
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    seconds = sum(record.seconds for record in records)
    late_s = max(record.runner_late_s for record in records)
    cpu = max(record.cpu_share for record in records)
    used = [record.first_served_s for record in records if record.first_served_s is not None]
    streams, tokens, lost = (
        sum(int(getattr(record, name)) for record in records) for name in ("streams", "output_tokens", "lost")
    )
    placed = sum(len(cold.placed) for cold in colds)
    return [
        "## Cold engines",
        "",
        _prose(
            f"**Command.** `make chaos COLD=1`: {len(records)} runs in {seconds / 60:.1f} minutes;",
            f"{records[0].machine}; {records[0].began[:16].replace('T', ' ')} UTC; commit {commits}. The machine woke the",
            f"clients up to {late_s:.2f} s late. Busy cores: at most {100 * cpu:.0f} %.",
        ),
        "",
        _prose(
            "**How.** Processes of one machine, with the pools, the rollout and the load of the matrix, and 1 control",
            "process. The first step of each shape costs an engine 0.3 s more. The replica of a fresh engine is held until",
            f"it is [warm](../warmup.md). The bound is {bound_s:g} s from its return on: the sum of the bounds of",
            "`warming`, `seeding` and `probing`. A service that is started anew at a living engine has 2 s. Each has 1 s",
            "more until a request is served. A killed part is started again 2 s after its end; a pause lasts 10 s.",
            "A machine is the service and the engine of a replica.",
        ),
        "",
        _prose(
            f"**Result.** {streams:,} streams, {tokens:,} tokens compared: **{lost} lost**; {placed} placed on a held",
            f"replica; violations in {bad} of {len(records)} runs. Each returned part was in use"
            if len(used) == len(records)
            else f"replica; violations in {bad} of {len(records)} runs. {len(used)} returned parts were in use",
            f"{max(used, default=0):.1f} s after its return at the latest.",
        ),
        "",
        *pages.table(COLUMNS, map(_row, records), "lrrrrrrrrrr"),
        "",
        _prose(
            "`boot` runs from the start of the part until it answers health. `in service` runs from then until all",
            "routers of its pool may place requests on it. `in use` ends with the first token of the first request",
            "that it served. A dash stands for a state that was left out. A paused part keeps its engine, which stays",
            "warm.",
        ),
        "",
        *pages.items(
            f"{record.part}:{record.fault}, seed {record.seed}: {violation}"
            for record in records
            for violation in record.violations
        ),
        *([""] if bad else []),
    ]


def _prose(*parts: str) -> str:
    return " ".join(parts)


def _row(record: Record) -> list[str]:
    cold = record.cold
    boot, service, states = "-", "-", "-"
    if isinstance(cold, ColdReturn):
        boot, service = f"{cold.boot_s:.1f}", _seconds(cold.in_service_s)
        if cold.held_looks:
            states = " / ".join(_seconds(cold.states_s.get(state)) for state in STATES)
    counts = (record.streams, record.in_flight)
    return [
        *(f"{record.part}, {record.fault}", str(record.seed), *map(str, counts), f"**{record.lost}**"),
        *(str(record.resumed), boot, service, _seconds(record.first_served_s), states),
        str(len(record.violations)),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
