"""The runs of a game day: every event at every load, with two and three regions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.gameday.events import BY_NAME, Event
from tests.gameday.records import Key, Record


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a game day."""

    event: Event
    load: str
    regions: int
    number: int
    """From 1."""

    @property
    def key(self) -> Key:
        """Names the run."""
        return self.event.name, self.load, self.regions, self.number


def planned(names: Iterable[str], loads: Iterable[str], counts: Iterable[int], runs: int) -> list[Run]:
    """Return the runs of a game day, in order. No loads or counts: those of each event. Repeats are the outer loop."""
    chosen, at, wanted = [BY_NAME[name] for name in names], tuple(loads), tuple(counts)
    return [
        Run(event, load, regions, number)
        for number in range(1, runs + 1)
        for event in chosen
        for regions in wanted or event.counts
        for load in at or event.loads
    ]


def missing(runs: Iterable[Run], records: Sequence[Record]) -> list[Run]:
    """Return the runs without a record that counts."""
    there = {record.key for record in records if not record.problems}
    return [run for run in runs if run.key not in there]
