"""The gate of memory leaks: steady growth of a canary replica that no comparison replica of its role shows. Pure."""

from __future__ import annotations

import itertools
import statistics
from typing import Final

import msgspec

from controlplane.rollouts.judge.events import MemoryReading
from controlplane.rollouts.judge.observation import CANARY
from controlplane.rollouts.judge.settings import MIB, JudgeSettings
from controlplane.rollouts.judge.verdict import GateReport, GateState

GATE: Final = "leak"
READINGS_MAX: Final = 64
"""Readings of a replica that are kept. At the bound every second reading is left out."""
READINGS_MIN: Final = 6
REPLICAS_MAX: Final = 1_024
STEADY_PART: Final = 0.5
"""The last third grows at least by this part of what the middle third grew. Caches that fill up grow less and less."""
RATE_FACTOR: Final = 2.0
"""A leak grows so many times as fast as the fastest comparison replica."""


class MemorySeries(msgspec.Struct):
    """Readings of a replica in this step, thinned."""

    track: str
    role: str
    readings: list[tuple[float, int]] = []

    def add(self, at_s: float, memory_bytes: int) -> None:
        """Add a reading. Readings out of order are left out."""
        if self.readings and at_s <= self.readings[-1][0]:
            return
        self.readings.append((at_s, memory_bytes))
        if len(self.readings) > READINGS_MAX:
            del self.readings[1::2]

    @property
    def span_s(self) -> float:
        """Time between the first reading and the last."""
        return self.readings[-1][0] - self.readings[0][0] if self.readings else 0.0

    def thirds(self) -> tuple[float, float, float]:
        """Return the median memory of the first, the middle and the last third of the readings."""
        number = len(self.readings)
        edges = (0, number // 3, number - number // 3, number)
        first, middle, last = (
            statistics.median(each[1] for each in self.readings[low:high])
            for low, high in itertools.pairwise(edges)
        )
        return first, middle, last

    def growth_bytes(self) -> float:
        """Return the growth from the first third to the last, extrapolated to the whole span. At least 0."""
        if len(self.readings) < READINGS_MIN:
            return 0.0
        first, _, last = self.thirds()
        return max(0.0, (last - first) * 1.5)

    def rate(self) -> float:
        """Return the growth in bytes per second."""
        return self.growth_bytes() / self.span_s if self.span_s > 0 else 0.0

    def is_steady(self) -> bool:
        """Whether the growth does not slow down much."""
        first, middle, last = self.thirds()
        return last - middle >= STEADY_PART * (middle - first)


class MemoryFacts(msgspec.Struct):
    """Memory of replicas in this step."""

    series: dict[str, MemorySeries] = {}

    def add(self, reading: MemoryReading) -> None:
        """Add a reading; those of new replicas beyond the bound are left out."""
        name = f"{reading.track}/{reading.replica}"
        series = self.series.get(name)
        if series is None:
            if len(self.series) >= REPLICAS_MAX:
                return
            series = self.series[name] = MemorySeries(reading.track, reading.role)
        series.add(reading.at_s, reading.memory_bytes)

    def report(self, settings: JudgeSettings) -> GateReport:
        """Fail if a canary replica grows steadily, by `leak_bytes_min`, and twice as fast as every other of its role."""
        growing = [
            (series.rate(), name)
            for name, series in self.series.items()
            if series.track == CANARY and _grows(series, settings)
        ]
        canaries = sum(series.track == CANARY for series in self.series.values())
        bound = float(settings.leak_bytes_min)
        if not growing:
            state = GateState.PASS if canaries else GateState.NOT_APPLICABLE
            reason = f"no canary replica has grown steadily by {bound / MIB:.0f} MiB"
            return GateReport(GATE, state, reason if canaries else "no memory was reported", 0.0, bound)
        rate, name = max(growing)
        role, growth = self.series[name].role, self.series[name].growth_bytes()
        others = [
            series.rate()
            for series in self.series.values()
            if series.track != CANARY and series.role == role and len(series.readings) >= READINGS_MIN
        ]
        told = f"replica {name.partition('/')[2]} grew by {growth / MIB:.0f} MiB, {rate / MIB:.2f} MiB/s"
        if not others:
            return GateReport(
                GATE, GateState.INCONCLUSIVE, f"{told}; no other {role} was read", growth, bound
            )
        fastest = max(others)
        state = GateState.FAIL if rate > RATE_FACTOR * fastest else GateState.PASS
        reason = f"{told}; the fastest {role} of the other tracks grew by {fastest / MIB:.2f} MiB/s"
        return GateReport(GATE, state, reason, growth, bound, comparison_samples=len(others))


def _grows(series: MemorySeries, settings: JudgeSettings) -> bool:
    return (
        len(series.readings) >= READINGS_MIN
        and series.span_s >= settings.leak_window_s
        and series.growth_bytes() >= settings.leak_bytes_min
        and series.is_steady()
    )
