"""The results of a replay: tables for people, JSON for machines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from simulator.cost import Cost
from simulator.measures import Measures, mean, spread
from simulator.plan import Compared, Plan, Sized
from simulator.runs import BOUND, ReplayRow

COLUMNS = (
    ("mean s", "mean_s"),
    ("p50", "p50_s"),
    ("p90", "p90_s"),
    ("p99", "p99_s"),
    ("max", "max_s"),
    ("goodput", "goodput"),
    ("hit", "hit"),
    ("imbal.", "imbalance"),
    ("work", "work"),
)
SHARES = ("goodput", "hit")
SIZING_TITLES = (
    *("cache", "GiB each", "replicas", "mean s", "p99", "goodput", "goodput with\none less", "hit", "busy"),
)


def comparison(one: Compared, cost: Cost, block_tokens: int) -> Table:
    """Return the policies of one row. The best mean, bounds aside, is bold."""
    row = one.row
    each = f"{cost.gib(one.capacity, block_tokens):,.0f} GiB each"
    cache = each if one.cache.gib else f"cache {one.cache} ({each})"
    table = _table(
        f"{row.replicas} replicas, {cache}, load {row.load:g} ({one.requests_per_s:.2f} requests/s)"
    )
    table.add_column("policy", no_wrap=True)
    for title, _ in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    means = {policy: mean(runs) for policy, runs in one.policies.items()}
    best = min((seen.mean_s for policy, seen in means.items() if policy != BOUND), default=math.inf)
    for policy, seen in means.items():
        runs = one.policies[policy]
        around = spread(runs) if len(runs) > 1 else None
        cells = [_cell(name, seen, around) for _, name in COLUMNS]
        table.add_row(
            policy, *cells, style="bold" if seen.mean_s == best else "dim" if policy == BOUND else ""
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        min_width=max(len(line) for line in title.split("\n")),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _cell(name: str, seen: Measures, around: Measures | None) -> str:
    value = getattr(seen, name)
    text = f"{value:.3f}" if name in SHARES else f"{value:.2f}"
    if around is not None and name in ("mean_s", "goodput"):
        text += f" ±{getattr(around, name):.2f}".replace("0.", ".", 1)
    return text


def sizing(rows: Sequence[Sized], plan: Plan) -> Table:
    """Return the table of the sizing."""
    title = f"Prefill replicas for {100 * plan.goodput:g}% of first tokens in time, {plan.policies[0]}"
    table = _table(f"{title},\nat {plan.pace()}")
    for title in SIZING_TITLES:
        table.add_column(title, justify="right" if title != "cache" else "left")
    for one in rows:
        seen, count = one.search.measures, one.search.found
        if seen is None or count is None or one.capacity is None:
            table.add_row(str(one.cache), "", f"more than {max(one.search.tried)}")
            continue
        less = one.search.goodput_with_one_less
        table.add_row(
            str(one.cache),
            f"{plan.cost.gib(one.capacity, plan.trace.block_tokens):,.0f}",
            str(count),
            f"{seen.mean_s:.2f}",
            f"{seen.p99_s:.2f}",
            f"{seen.goodput:.3f}",
            "" if less is None else f"{less:.3f}",
            f"{seen.hit:.3f}",
            f"{seen.busy:.0%}",
        )
    return table


def as_json(rows: Sequence[Compared], sized: Sequence[Sized], goodput: float, policy: str) -> dict[str, Any]:
    """Return all results by name; times in seconds."""
    return {
        "comparison": [
            {
                "row": row_dict(one.row),
                "cache": str(one.cache),
                "cache_blocks_per_replica": one.capacity,
                "requests_per_s": one.requests_per_s,
                "policies": {name: figures(runs) for name, runs in one.policies.items()},
            }
            for one in rows
        ],
        "sizing": [
            {
                "cache": str(one.cache),
                "cache_blocks_per_replica": one.capacity,
                "goodput_wanted": goodput,
                "policy": policy,
                "replicas": one.search.found,
                "figures": one.search.measures.as_dict() if one.search.measures else None,
                "goodput_with_one_less": one.search.goodput_with_one_less,
                "tried": {str(count): seen.goodput for count, seen in sorted(one.search.tried.items())},
            }
            for one in sized
        ],
    }


def figures(runs: Sequence[Measures]) -> dict[str, Any]:
    """Return the mean over seeds, and half the distance of the extremes."""
    return {"mean": mean(runs).as_dict(), "spread": spread(runs).as_dict(), "seeds": len(runs)}


def row_dict(row: ReplayRow) -> dict[str, Any]:
    """Return the row as a dict for JSON, with None for infinity."""
    ahead = row.dispatch_ahead_s
    return {
        "replicas": row.replicas,
        "load": row.load,
        "cache": row.cache,
        "cache_blocks": row.cache_blocks,
        "order": row.order.value,
        "routers": row.routers,
        "staleness_s": row.delay_s,
        "loss": row.loss,
        "dispatch_ahead_s": None if math.isinf(ahead) else ahead,
        "copies": row.copies,
        "slowness": row.slowness,
        "away_s": row.outage_s,
        "kv_events": row.has_events,
        "unseen": row.unseen,
        "cost": {"name": row.cost.name, "c0_s": row.cost.c0_s, "a_s": row.cost.a_s, "b_s": row.cost.b_s},
    }
