"""The runs of a comparison: by system, version and policy, as JSON and as a table of medians and extremes. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from bench import pages

About = TypeVar("About")
"""A dataclass: settings that all runs share."""
Figures = TypeVar("Figures")
"""A dataclass: the figures of one run."""


class Column(NamedTuple):
    """A title, and the cell for the runs of one row."""

    title: str
    cell: Callable[[Sequence[Any]], str]


def column(title: str, read: Callable[[Any], float | None], digits: int) -> Column:
    """Return a column of medians, with the smallest and the largest run if they differ."""
    return Column(title, lambda runs: pages.spread(map(read, runs), digits))


@dataclass(slots=True)
class Record(Generic[About, Figures]):
    """All runs of a command."""

    command: str
    machine: Mapping[str, str]
    about: About
    seconds: float = 0.0
    runs: dict[tuple[str, str, str], list[Figures]] = field(default_factory=dict)
    """By system, version and policy, in the order of the first run."""
    unavailable: dict[str, str] = field(default_factory=dict)
    """Systems that could not be installed, with the reason."""
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, policy: str, figures: Figures) -> None:
        """Add one run."""
        self.runs.setdefault((name, version, policy), []).append(figures)

    def to_json(self) -> str:
        """Return the record as JSON."""
        told: dict[str, Any] = {
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            **_asdict(self.about),
            "runs": [
                {"system": name, "version": version, "policy": policy, "run": number, **_asdict(figures)}
                for (name, version, policy), runs in self.runs.items()
                for number, figures in enumerate(runs, 1)
            ],
            "unavailable": self.unavailable,
            "problems": self.problems,
        }
        return json.dumps(told, indent=2) + "\n"

    def table(self, columns: Sequence[Column]) -> list[str]:
        """Return the table: a row per system and policy, and one for each unmeasured system."""
        rows = [
            [f"{name} {version}", policy, str(len(runs)), *(column.cell(runs) for column in columns)]
            for (name, version, policy), runs in self.runs.items()
        ]
        for name, reason in self.unavailable.items():
            rows.append([name, f"not measured: {reason.replace('|', '/')}", *[""] * (len(columns) + 1)])
        return pages.table(("system", "policy", "runs", *(column.title for column in columns)), rows, "llr")


def _asdict(fields: Any) -> dict[str, Any]:
    return asdict(fields)
