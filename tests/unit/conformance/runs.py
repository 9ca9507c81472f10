"""Runs of all checks on fake servers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvmesh.conformance.assembly import Target, opened_trial
from kvmesh.conformance.check import Check
from kvmesh.conformance.checks.all_checks import all_checks
from kvmesh.conformance.runner import run_checks
from kvmesh.conformance.trial import Settings
from kvmesh.conformance.verdict import Outcome, Row
from tests.unit.conformance.fake_server import FakeServer
from tests.unit.frontend.budgets.virtual_time import simulate

CANCELS = 24
SETTLE_S = 1.0
"""Time in which the servers end their last step."""


def run(
    server: type[FakeServer] = FakeServer,
    *,
    changed: Callable[[FakeServer], None] | None = None,
    pair: type[FakeServer] | None = FakeServer,
    has_pair: bool = True,
    checks: tuple[Check, ...] | None = None,
    sizes: dict[str, int] | None = None,
    **settings: Any,
) -> tuple[list[Row], FakeServer]:
    """Return the rows of a run on a server of this kind, and the server."""
    options = Settings(**{"cancels": CANCELS, "is_hostile": True, "call_s": 8.0, **settings})

    async def work() -> tuple[list[Row], FakeServer]:
        peers: dict[str, FakeServer] = {}
        engine = server("a:1", peers)
        other = (pair or server)("b:1", peers)
        for each in (engine, other):
            if changed is not None:
                changed(each)
        target = Target(client=engine, pair=other if has_pair else None, sizes=sizes or {})
        async with opened_trial(target, options) as trial:
            rows = await run_checks(trial, checks or all_checks(options.cancels), lambda check, row: None)
        await asyncio.sleep(SETTLE_S)
        return rows, engine

    return simulate(work())


def failed(rows: list[Row]) -> dict[str, str]:
    """Return the checks that failed, with their reasons."""
    return {
        f"{row.capability}: {row.check}": row.verdict.why
        for row in rows
        if row.verdict.outcome is Outcome.FAIL
    }


def by_outcome(rows: list[Row], outcome: Outcome) -> list[str]:
    """Return the checks with this outcome."""
    return [f"{row.capability}: {row.check}" for row in rows if row.verdict.outcome is outcome]
