"""`kvmesh region plan`: the utilisation that lets the loss of one region be carried, as tables. Pure."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from kvmesh.regions.plan import move_cost, utilisation

REGIONS: Final = (2, 3, 4)
HIT_RATIOS: Final = (0.0, 0.5, 0.8, 0.9)
SEEDED: Final = (0.0, 0.5, 1.0)
"""Values of an option that is not given."""

Row = tuple[int, float, float]


def rows(regions: int | None, hit_ratio: float | None, seeded: float | None) -> list[Row]:
    """Return the combinations to show: each option that is given, else its usual values."""
    return [
        (count, ratio, share)
        for count in ((regions,) if regions is not None else REGIONS)
        for ratio in ((hit_ratio,) if hit_ratio is not None else HIT_RATIOS)
        for share in ((seeded,) if seeded is not None else SEEDED)
    ]


def screen(wanted: list[Row], utilisation_max: float) -> RenderableType:
    """Return a table for each number of regions: a row for each hit ratio, a column for each seeded share."""
    seeded = sorted({share for _, _, share in wanted})
    tables: list[RenderableType] = []
    for count in sorted({each for each, _, _ in wanted}):
        table = Table(title=f"{count} regions", title_justify="left")
        table.add_column("hit ratio", justify="right")
        for share in seeded:
            table.add_column(f"{share:.0%} seeded", justify="right")
        for ratio in sorted({ratio for _, ratio, _ in wanted}):
            found = (utilisation(count, ratio, share, utilisation_max) for share in seeded)
            table.add_row(f"{ratio:g}", *(f"{each:.0%}" for each in found))
        tables.append(table)
    return Group(*tables)


def explanation(utilisation_max: float) -> str:
    """Return what the figures mean."""
    return (
        "Each figure: the part of its capacity that each of the equal regions may use, in uncached prompt tokens/s. "
        f"After the loss of one region the others are then at {utilisation_max:.0%} or below. "
        "Seeded: share of the hot prefixes that the others have in their caches by then."
    )


def as_dicts(wanted: list[Row], utilisation_max: float) -> dict[str, Any]:
    """Return the same figures for programs."""
    return {
        "utilisation_max": utilisation_max,
        "plan": [
            {
                "regions": count,
                "hit_ratio": ratio,
                "seeded": share,
                "move_cost": move_cost(ratio, share),
                "utilisation": utilisation(count, ratio, share, utilisation_max),
            }
            for count, ratio, share in wanted
        ],
    }
