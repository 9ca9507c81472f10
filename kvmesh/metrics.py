"""Prometheus metrics of one process.

The hot path changes plain integers: `counter.value += 1`, `histogram.observe(x)`. Prometheus objects are made only at a
scrape, on the thread of the event loop. So no lock is needed.

Names are `kvmesh_<role>_<term>_<unit>`, the unit last (`_seconds`, `_tokens`, `_bytes`, `_blocks`, `_requests`). The
exporter adds `_total` to counters. The cardinality of labels must be bounded.
"""

from __future__ import annotations

import asyncio
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds for durations."""

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that only grows. Add to `value` directly."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: int | float = 0


class Histogram:
    """Counts of observations per bucket. `counts[i]` holds (bounds[i-1], bounds[i]]. The last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative buckets of Prometheus: (upper bound, observations up to it)."""
        seen, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            out.append((bound, float(seen)))
        return out


class Gauge:
    """A value that `read` returns at a scrape. `read` must be fast and must not fail."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read


class Total:
    """A counter that its owner keeps. `read` returns its value at a scrape, which must never decrease."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read


Series = Counter | Histogram | Gauge | Total


class Metrics(Collector):
    """All metrics of one process, by name and labels. MeshProcess builds it and passes it on.

    A known name with other label values is a new series of the metric. A series that exists, another kind, or other label
    names raise ValueError.
    """

    def __init__(self, role: str) -> None:
        self._prefix = f"kvmesh_{role}_"
        self._about: dict[str, str] = {}
        self._series: dict[str, dict[Labels, Series]] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def counter(self, name: str, about: str, **labels: str) -> Counter:
        """Return a new counter, at 0. The exporter adds `_total` to its name."""
        counter = Counter()
        self._add(name, about, labels, counter)
        return counter

    def histogram(self, name: str, about: str, bounds: Sequence[float] = SECONDS, **labels: str) -> Histogram:
        """Return a new, empty histogram with ascending upper `bounds`."""
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds of {name} must ascend, got {bounds}")
        histogram = Histogram(bounds)
        self._add(name, about, labels, histogram)
        return histogram

    def gauge(self, name: str, about: str, read: Callable[[], float], **labels: str) -> None:
        """Export the value that `read` returns at each scrape."""
        self._add(name, about, labels, Gauge(read))

    def total(self, name: str, about: str, read: Callable[[], float], **labels: str) -> None:
        """Export the value that `read` returns at each scrape as a counter. The exporter adds `_total` to its name."""
        self._add(name, about, labels, Total(read))

    def forget(self, name: str, **labels: str) -> None:
        """Stop exporting the series of `name` with these labels. Raises ValueError if it does not exist."""
        key: Labels = tuple(sorted(labels.items()))
        series = self._series.get(name, {})
        if series.pop(key, None) is None:
            raise ValueError(f"metric {name} {labels} does not exist")
        if not series:
            del self._series[name]

    def process_gauges(self) -> None:
        """Export open tasks of the running loop, open file descriptors and resident memory."""
        loop = asyncio.get_running_loop()
        self.gauge("process_tasks", "Open asyncio tasks.", lambda: len(asyncio.all_tasks(loop)))
        self.gauge("process_open_fds", "Open file descriptors.", open_fds)
        self.gauge("process_resident_bytes", "Resident memory.", resident_bytes)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as objects of Prometheus. Called by the registry."""
        for name, series in self._series.items():
            yield _family(self._prefix + name, self._about[name], series)

    def text(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _add(self, name: str, about: str, labels: dict[str, str], one: Series) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} must be lower-case words joined by _")
        series = self._series.setdefault(name, {})
        key: Labels = tuple(sorted(labels.items()))
        if key in series:
            raise ValueError(f"metric {name} {labels} exists already")
        for known, other in series.items():
            if type(other) is not type(one) or _names(known) != _names(key):
                raise ValueError(f"metric {name} {labels} differs in kind or label names from {dict(known)}")
        self._about[name] = about
        series[key] = one


def _names(labels: Labels) -> list[str]:
    return [name for name, _ in labels]


def _family(name: str, about: str, series: dict[Labels, Series]) -> Metric:
    labels, first = next(iter(series.items()))
    names = _names(labels)
    if isinstance(first, Counter | Total):
        counters = CounterMetricFamily(name, about, labels=names)
        for labels, one in series.items():
            if isinstance(one, Counter | Total):
                value = one.value if isinstance(one, Counter) else one.read()
                counters.add_metric([label for _, label in labels], value)
        return counters
    if isinstance(first, Histogram):
        histograms = HistogramMetricFamily(name, about, labels=names)
        for labels, one in series.items():
            if isinstance(one, Histogram):
                histograms.add_metric([value for _, value in labels], one.buckets(), one.total)
        return histograms
    gauges = GaugeMetricFamily(name, about, labels=names)
    for labels, one in series.items():
        if isinstance(one, Gauge):
            gauges.add_metric([value for _, value in labels], one.read())
    return gauges


def open_fds() -> int:
    """Return the number of open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # without the descriptor of this listing


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
