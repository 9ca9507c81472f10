"""The record of one run of a game day, and the file of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench.run_records import RunRecords
from tests.gameday.bins import Bin
from tests.gameday.views import View

Key = tuple[str, str, int, int]
"""Event, load, number of regions, number of the run."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput of one region of 1 + 1 alone, under more load than it can take."""

    requests_per_s: float
    tokens_per_s: float
    """Uncached prompt tokens."""
    hit_ratio: float
    commit: str = ""
    cpu: str = ""
    busy: float = 0.0
    """Share of busy core time."""
    late_s: float = 0.0


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Moments of a run, in seconds after the begin of the event."""

    steady_s: float
    """Begin of the undisturbed time, negative."""
    struck_s: float
    """End of the fault's injection."""
    heal_s: float
    """Begin of the healing."""
    healed_s: float
    ended_s: float


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the record of a run and its result share."""

    event: str
    load: str
    regions: tuple[str, ...]
    """The target first."""
    number: int
    commit: str
    cpu: str
    began: str
    took_s: float
    capacity: Capacity
    utilisation: float
    """Load of each region before the event, as a part of its capacity."""
    capacities: Mapping[str, float]
    """Region -> uncached tokens per second that it can compute, by its replicas."""
    times: Times
    busy: float
    late_s: float
    """Longest delay of the event loop of the clients, or of the runner."""
    settled: int | None = None
    """Tokens that the frontends settled during the load. None: a frontend or a Redis ended."""
    cost: tuple[int, int] = (0, 0)
    """Least and most tokens that the requests may be charged."""
    problems: tuple[str, ...] = ()
    """Reasons to reject the run."""
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """Names the run."""
        return self.event, self.load, len(self.regions), self.number


class Record(RunFacts, frozen=True, kw_only=True):
    """One run as it was measured."""

    bins: tuple[Bin, ...]
    views: tuple[View, ...]

    @property
    def target(self) -> str:
        """The region that breaks."""
        return self.regions[0]

    @property
    def survivors(self) -> tuple[str, ...]:
        """The other regions."""
        return self.regions[1:]


class Records(RunRecords[Record]):
    """The records of one file, oldest first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Record, lambda record: record.key)
