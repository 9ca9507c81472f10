"""Cells of faults in regions: a region, the link between two of them, and a region's Redis. Pure."""

from __future__ import annotations

from typing import Final

from tests.chaos.cells import Cell, CellError, Run

REGIONAL: Final = (("region", "kill"), ("region", "cut"), ("link", "slow"), ("region-redis", "kill"))
"""They need two regions, so no cell of the matrix is among them."""

SHORT: Final = Run(Cell("region", "kill"), 1)
"""The run of the short form."""

SEEDS: Final = 2


def split(text: str) -> tuple[str, str]:
    """Return the words of "prefill:kill,region:cut" that name no cell of regions, and those that do."""
    known = [str(cell) for cell in cells()]
    words = [word.strip() for word in text.split(",") if word.strip()]
    return ",".join(word for word in words if word not in known), ",".join(
        word for word in words if word in known
    )


def cells() -> list[Cell]:
    """Return all cells."""
    return [Cell(part, fault) for part, fault in REGIONAL]


def regional_form(text: str, seeds: int | None = None, only_seed: int | None = None) -> list[Run]:
    """Return the runs of "region:kill,link:slow"; "" means all. Seeds are 1 to `seeds` (SEEDS), or `only_seed` alone.

    Raises CellError with the unknown name.
    """
    known = {str(cell): cell for cell in cells()}
    named = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    for word in named:
        if word not in known:
            raise CellError(f"{word!r} is no cell of regions; allowed are {', '.join(known)}")
    every = [only_seed] if only_seed is not None else range(1, (seeds or SEEDS) + 1)
    return [Run(known[word], seed) for seed in every for word in named or known]
