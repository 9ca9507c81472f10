"""The fault matrix: the parts, the faults, the runs of each cell, and the short form. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PARTS: Final = (
    *("frontend", "router", "prefill", "decode", "prefill-engine", "decode-engine", "redis", "control"),
)

FAULTS: Final = ("kill", "term", "pause", "cut", "slow")
"""SIGKILL; SIGTERM; a pause (SIGSTOP); a partition (all packets lost); slow packets, some of them lost."""

LINK: Final = "link"
"""A partition between two engines that still reach all other parts: only KV transfers use that link."""

LINKED: Final = {"prefill-engine": "decode-engine"}
"""Part -> the only part from which it is cut off."""

DUPLICATE: Final = "duplicate"
"""A second process with the name of the part, started beside it and killed after a while."""

DUPLICATED: Final = ("frontend", "router", "prefill", "decode")
"""Parts that register under a name."""

NAMED: Final = (*FAULTS, LINK, DUPLICATE)

ENDING: Final = frozenset({"kill", "term"})
"""Faults that end the part; it is started again."""

FAULT_S: Final = 10.0
"""Duration of a pause, a cut and a slow spell."""

DOWN_S: Final = 2.0
"""Time until an ended part is started again: the delay of a supervisor."""

SEEDS: Final = {"kill": 5, "term": 2, "pause": 5, "cut": 2, "slow": 2, LINK: 2, DUPLICATE: 2}
"""Runs of one cell in the long form."""

SHORT: Final = (
    # Every part and every fault at least once; kills and pauses of the parts with the most state.
    ("frontend", "kill"),
    ("router", "kill"),
    ("prefill", "slow"),
    ("decode", "cut"),
    ("prefill-engine", "kill"),
    ("decode-engine", "pause"),
    ("redis", "term"),
    ("control", "kill"),
)


MACHINE: Final = "machine"
"""Suffix of a part that is a replica's service and its engine together."""

COLD: Final = (
    *(
        ("prefill-engine", "kill"),
        ("decode-engine", "kill"),
        ("prefill-engine", "pause"),
        ("decode-engine", "pause"),
    ),
    *(("prefill-machine", "kill"), ("decode-machine", "kill"), ("prefill", "kill"), ("decode", "kill")),
    *(("prefill", "pause"), ("decode", "pause")),
)
"""Cells of the cold form: faults after which a replica or its engine returns."""


class CellError(ValueError):
    """An unknown cell was named; the text lists the known ones."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One field of the matrix."""

    part: str
    fault: str

    def __str__(self) -> str:
        return f"{self.part}:{self.fault}"

    @property
    def ends_the_part(self) -> bool:
        """True if the part is gone and has to be started again."""
        return self.fault in ENDING


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One execution of a cell; its seed determines all of it."""

    cell: Cell
    seed: int

    @classmethod
    def warm(cls) -> Run:
        """Return a run without a cell: its seed gives the prompts that warm a mesh."""
        return cls(Cell("none", "none"), 0)

    @property
    def replay(self) -> str:
        """The command that repeats the run."""
        return f"make chaos ONLY={self.cell} SEED={self.seed}"


def parse(text: str) -> list[Cell]:
    """Return the cells of "prefill:kill,redis:cut"; a part or a fault alone means all of its cells, "" means all.

    Raises CellError with the unknown name.
    """
    cells: dict[Cell, None] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        part, colon, fault = word.partition(":")
        if not colon and part in NAMED:
            part, fault = "", part
        if part and part not in PARTS:
            raise CellError(f"{part!r} is no part of the matrix; allowed are {', '.join(PARTS)}")
        if fault and fault not in NAMED:
            raise CellError(f"{fault!r} is no fault of the matrix; allowed are {', '.join(NAMED)}")
        if part and fault and not _has(part, fault):
            having = ", ".join(f"{one}:{fault}" for one in PARTS if _has(one, fault))
            raise CellError(f"{part}:{fault} is not in the matrix; it has {having}")
        for cell in everything():
            if part in ("", cell.part) and fault in ("", cell.fault):
                cells[cell] = None
    return list(cells) or everything()


def everything() -> list[Cell]:
    """Return all cells, faults of one part together."""
    return [Cell(part, fault) for part in PARTS for fault in NAMED if _has(part, fault)]


def cold_form(text: str, seed: int = 1) -> list[Run]:
    """Return the runs of "prefill:kill,prefill-machine:kill", which are cells of COLD; "" means all of them.

    Raises CellError with the unknown name.
    """
    known = {str(cell): cell for cell in (Cell(part, fault) for part, fault in COLD)}
    named = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    for word in named:
        if word not in known:
            raise CellError(f"{word!r} is no cell of the cold form; allowed are {', '.join(known)}")
    return [Run(known[word], seed) for word in named or known]


def _has(part: str, fault: str) -> bool:
    """True if the matrix has that fault of that part."""
    return part in {LINK: tuple(LINKED), DUPLICATE: DUPLICATED}.get(fault, PARTS)


def long_form(cells: list[Cell], seeds: int | None = None, only_seed: int | None = None) -> list[Run]:
    """Return the runs of `cells`: seeds 1 to the count in SEEDS, or to `seeds`; or `only_seed` alone.

    Seeds are the outer loop: an interrupted matrix has covered all cells.
    """
    if only_seed is not None:
        return [Run(cell, only_seed) for cell in cells]
    wanted = {cell: seeds or SEEDS[cell.fault] for cell in cells}
    return [
        Run(cell, seed)
        for seed in range(1, max(wanted.values(), default=0) + 1)
        for cell in cells
        if seed <= wanted[cell]
    ]


def short_form(seed: int = 1) -> list[Run]:
    """Return the runs of the short form."""
    return [Run(Cell(part, fault), seed) for part, fault in SHORT]
