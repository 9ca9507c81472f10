"""`kvmesh conformance`: runs the checks on an engine, and prints their table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from kvmesh.bad_option import BadOption
from kvmesh.cli.fitted_table import Column, FittedTable, output_console
from kvmesh.conformance.assembly import Target, opened_trial
from kvmesh.conformance.check import Check
from kvmesh.conformance.checks.all_checks import all_checks
from kvmesh.conformance.offer import SIZES, Disagreement, Offer
from kvmesh.conformance.runner import run_checks
from kvmesh.conformance.trial import Settings
from kvmesh.conformance.verdict import Outcome, Row, has_failed
from kvmesh.triton.client import TritonClient
from kvmesh.triton.errors import CallError

UNREACHED: Final = 2

_COLUMNS: Final = (
    Column("capability"),
    Column("check", is_text=True),
    Column("result"),
    Column("why", is_text=True),
)
_STYLES: Final = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.NOT_OFFERED: "yellow",
    Outcome.NOT_JUDGED: "dim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The options of one run, checked."""

    triton: str
    pair: str = ""
    model: str
    metrics: str = ""
    sizes: Mapping[str, int]
    """Sizes by the names of `offer.SIZES`; 0: not given."""
    settings: Settings


async def conformance(run: Run, *, as_json: bool) -> int:
    """Run all checks and print them. Return the exit status: 0, 1 if a check failed, 2 if a server does not answer."""
    checks = all_checks(run.settings.cancels)
    try:
        async with AsyncExitStack() as stack:
            client = TritonClient(run.triton, run.model)
            stack.push_async_callback(client.close)
            pair = TritonClient(run.pair, run.model) if run.pair else None
            if pair is not None:
                stack.push_async_callback(pair.close)
            target = Target(client=client, pair=pair, metrics=run.metrics, sizes=run.sizes)
            trial = await stack.enter_async_context(opened_trial(target, run.settings))
            rows = await run_checks(trial, checks, _progress(len(checks)))
    except CallError as error:
        where = f"{run.triton} and {run.pair}" if run.pair else run.triton
        sys.stderr.write(f"The model {run.model} at {where} cannot be read: {error}\n")
        return UNREACHED
    except Disagreement as error:
        raise BadOption(str(error)) from None
    if as_json:
        sys.stdout.write(f"{json.dumps(record(run, trial.offer, rows), indent=2)}\n")
    else:
        console = output_console()
        console.print(table(rows))
        console.print(summary(rows))
    return 1 if has_failed(rows) else 0


def table(rows: Sequence[Row]) -> FittedTable:
    """Return the table of the checks."""
    made = FittedTable(_COLUMNS)
    for row in rows:
        outcome = row.verdict.outcome
        made.add_row(row.capability, row.check, Text(outcome.value, style=_STYLES[outcome]), row.verdict.why)
    return made


def summary(rows: Sequence[Row]) -> str:
    """Return the numbers of results in words."""
    counts = Counter(row.verdict.outcome for row in rows)
    parts = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    return f"{len(rows)} checks: {parts}."


def record(run: Run, offer: Offer, rows: Sequence[Row]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "triton": run.triton,
        "pair": run.pair,
        "model": offer.model,
        "sizes": {name: getattr(offer, name) for name in SIZES},
        "settings": asdict(run.settings),
        "failed": sum(row.verdict.outcome is Outcome.FAIL for row in rows),
        "checks": [
            {
                "capability": row.capability,
                "check": row.check,
                "result": row.verdict.outcome.value,
                "why": row.verdict.why,
                "seconds": round(row.seconds, 3),
            }
            for row in rows
        ],
    }


class _Lines:
    """A line for each check on a terminal's stderr; elsewhere nothing."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._number = 0

    def __call__(self, check: Check, row: Row | None) -> None:
        if not self._console.is_terminal:
            return
        if row is None:
            self._number += 1
            line = Text(f"[{self._number}/{self._total}] {check.capability}: {check.name} ... ")
            self._console.print(line, end="", soft_wrap=True)
            return
        outcome = row.verdict.outcome
        self._console.print(Text(f"{outcome.value}, {row.seconds:.1f} s", style=_STYLES[outcome]))


def _progress(total: int) -> _Lines:
    return _Lines(Console(stderr=True), total)
