"""Tables of `kvmesh tenants` for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from kvmesh.buckets.limits import Limit

NONE: Final = "-"
NO_LIMIT: Final = "no limit"

_LIFTED_BY_0: Final = ("requests_per_min", "tokens_per_min", "concurrency")


def tenants_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per tenant."""
    table = Table()
    for name in ("tenant", "of", "class"):
        table.add_column(name, overflow="fold")
    for name in ("weight", "requests\na minute", "tokens\na minute", "at a\ntime", "state"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        limits = row["limits"]
        table.add_row(
            *(row["name"], row["organisation"], row["class"], f"{row['weight']:g}"),
            *(_limit(limits[kind], "none") for kind in _LIFTED_BY_0),
            "[red]disabled[/]" if row["disabled"] else "changed" if row["changed"] else NONE,
        )
    return table


def tenant_table(found: Mapping[str, Any]) -> Table:
    """Return the values, limits, keys and changes of one tenant."""
    table = Table(show_header=False)
    for name in ("organisation", "class", "weight", "strict", "clamp", "cached_discount", "disabled"):
        table.add_row(name, value_text(found[name]))
    _add_limits(table, found["limits"])
    for name in ("identities", "gateway_identities"):
        if found[name]:
            table.add_row(name, ", ".join(found[name]))
    for key in found["keys"]:
        words = [key["name"]]
        words += ["gateway"] if key["gateway"] else []
        words += ["disabled"] if key["disabled"] else []
        words += [] if key["configured"] else ["in Redis only"]
        table.add_row("key", ", ".join(words))
    _add_changes(table, found["changed"])
    return table


def organisation_table(found: Mapping[str, Any]) -> Table:
    """Return the limits, tenants and changes of one organisation, and its ledger if there is one."""
    table = Table(show_header=False)
    _add_limits(table, found["limits"])
    table.add_row("tenants", ", ".join(found["tenants"]) or NONE)
    _add_changes(table, found["changed"])
    if found["ledger"] is not None:
        totals = found["ledger"]
        table.add_row(
            "reserved now",
            f"{totals['held']:,} tokens in {totals['open_count']:,} reservations",
        )
    return table


def usage_table(uses: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per scope with the remainder of each limit."""
    table = Table()
    for name in ("limit of", "requests left", "tokens left", "running", "open overrun"):
        table.add_column(name, overflow="fold")
    for use in uses:
        limits = Limit(**use["limits"])
        table.add_row(
            use["scope"],
            _left(use["requests"], limits.requests_burst),
            _left(use["tokens"], limits.tokens_burst),
            f"{use['slots']} of {limits.concurrency}" if limits.concurrency else str(use["slots"]),
            f"{use['overrun']:,} of {limits.tokens_overrun:,.0f}"
            if limits.tokens_overrun
            else f"{use['overrun']:,}",
        )
    return table


def _add_limits(table: Table, limits: Mapping[str, float]) -> None:
    for name, value in limits.items():
        table.add_row(name, _limit(value, NO_LIMIT if name in _LIFTED_BY_0 else NONE))


def _add_changes(table: Table, changes: Mapping[str, Any]) -> None:
    if changes:
        table.add_row("changed", ", ".join(change_text(key, value) for key, value in changes.items()))


def _left(level: float | None, burst: float) -> str:
    return NONE if level is None else f"{level:,.0f} of {burst:,.0f}"


def _limit(value: float, none: str) -> str:
    return f"{value:,.10g}" if value else none


def change_text(key: str, value: Any) -> str:
    """Return a change in words. The value 0 lifts a limit."""
    return f"{key}: {NO_LIMIT}" if key in _LIFTED_BY_0 and not value else f"{key} = {value_text(value)}"


def value_text(value: Any) -> str:
    """Return a value as it is written in the configuration."""
    if isinstance(value, float):
        return f"{value:,.10g}"
    return value if isinstance(value, str) else json.dumps(value)
