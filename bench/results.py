"""Measured figures: the values of one metric in one case over the repeats, with the aim. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BenchError(Exception):
    """A measurement failed. The text names the process and the reason."""


class Key(NamedTuple):
    """Names a figure."""

    scenario: str
    case: str
    metric: str


class Aim(NamedTuple):
    """The limit of a figure, upper or lower."""

    limit: float
    is_least: bool = False

    def __str__(self) -> str:
        return "at least" if self.is_least else "at most"

    def is_met(self, value: float) -> bool:
        """True if `value` is within the aim."""
        return value >= self.limit if self.is_least else value <= self.limit


@dataclass(slots=True)
class Figure:
    """One metric in one case: a value per repeat."""

    key: Key
    unit: str
    values: list[float] = field(default_factory=list)
    aim: Aim | None = None
    is_doubtful: bool = False
    """True if the load differed from the case: see the problems."""

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """True if the median is within the aim; None without an aim."""
        return None if self.aim is None else self.aim.is_met(self.median)

    def to_json(self) -> dict[str, Any]:
        """Return the figure as a plain object."""
        return {
            **self.key._asdict(),
            "unit": self.unit,
            "min": min(self.values),
            "median": self.median,
            "max": max(self.values),
            "values": self.values,
            "aim_max": None if self.aim is None or self.aim.is_least else self.aim.limit,
            "aim_min": self.aim.limit if self.aim is not None and self.aim.is_least else None,
            "met": self.is_met,
            "doubtful": self.is_doubtful,
        }


class Results:
    """All figures of a run, in the order in which they were first measured."""

    def __init__(self, aims: dict[Key, Aim] | None = None) -> None:
        self.figures: dict[Key, Figure] = {}
        self.problems: list[str] = []
        """Failed measurements, and those under a load generator that was too slow."""
        self._aims = aims or {}
        self._doubted: set[tuple[str, str]] = set()

    def add(self, scenario: str, case: str, metric: str, unit: str, value: float) -> None:
        """Add one value of one repeat."""
        key = Key(scenario, case, metric)
        figure = self.figures.get(key)
        if figure is None:
            is_doubtful = (scenario, case) in self._doubted
            figure = self.figures[key] = Figure(key, unit, [], self._aims.get(key), is_doubtful)
        figure.values.append(value)

    def problem(self, scenario: str, text: str, case: object = None) -> None:
        """Record a problem once. `case`: its figures are doubtful in all repeats."""
        told = f"{scenario}: {text}" if case is None else f"{scenario}, {case}: {text}"
        if told not in self.problems:
            self.problems.append(told)
        if case is None:
            return
        self._doubted.add((scenario, str(case)))
        for key, figure in self.figures.items():
            figure.is_doubtful |= key[:2] in self._doubted

    def of(self, scenario: str) -> list[Figure]:
        """Return the figures of one scenario."""
        return [figure for figure in self.figures.values() if figure.key.scenario == scenario]

    def scenarios(self) -> Iterable[str]:
        """Return the scenarios with figures, in order."""
        return dict.fromkeys(key.scenario for key in self.figures)


@dataclass(frozen=True, slots=True)
class ScenarioResults:
    """The figures of one scenario."""

    results: Results
    scenario: str

    @property
    def repeats(self) -> int:
        """Repeats so far: most values of a figure."""
        return max((len(figure.values) for figure in self.results.of(self.scenario)), default=0)

    def add(self, case: object, metric: str, unit: str, value: float) -> None:
        """Add one value of one repeat."""
        self.results.add(self.scenario, str(case), metric, unit, value)

    def problem(self, text: str, case: object = None) -> None:
        """Record a problem once. `case`: its figures are doubtful in all repeats."""
        self.results.problem(self.scenario, text, case)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed. Raises BenchError without values."""
    ordered = sorted(values)
    if not ordered:
        raise BenchError("no request had a first token")
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
