"""Calls of a game day, counted in bins of 0.25 s by home region and kind of caller. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tests.gameday import calls
from tests.gameday.calls import Call

BIN_S: Final = 0.25


class Bin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests of one kind of callers of one region, sent within one bin; `uncached` alone is of those that ended in it."""

    at: int
    """Number of the bin. The event begins at the start of bin 0."""
    home: str
    kind: str
    outcomes: Mapping[str, int] = {}
    """Requests by `calls.OUTCOMES`."""
    stale: int = 0
    """Streams among the cut ones that ended because no region serves their version."""
    attempts: int = 0
    resumes: int = 0
    ttfts_ms: tuple[int, ...] = ()
    """TTFT of the good requests."""
    fronts: Mapping[str, int] = {}
    """Good requests by the region of their last frontend."""
    served: Mapping[str, int] = {}
    """Good requests by the region of their last attempt."""
    tried: Mapping[str, int] = {}
    """Attempts by region, as far as they are explained."""
    uncached: Mapping[str, int] = {}
    """Computed prompt tokens of good requests that ended in this bin, by the region that served them."""

    @property
    def sent(self) -> int:
        """Number of requests."""
        return sum(self.outcomes.values())


def bin_of(at_s: float) -> int:
    """Return the number of the bin of a time."""
    return math.floor(at_s / BIN_S)


def binned(found: Iterable[Call], struck_s: float) -> list[Bin]:
    """Return the bins of all calls, by time. `struck_s`: begin of the event on the clock of the calls."""
    made: defaultdict[tuple[int, str, str], _Counts] = defaultdict(_Counts)
    for call in found:
        made[bin_of(call.sent_s - struck_s), call.home, call.kind].take(call)
        if call.outcome == calls.GOOD:
            uncached = call.prompt_tokens - call.cached_tokens
            made[bin_of(call.ended_s - struck_s), call.home, call.kind].uncached[call.served] += uncached
    return [counts.bin(*key) for key, counts in sorted(made.items())]


class _Counts:
    def __init__(self) -> None:
        self.outcomes, self.fronts = Counter[str](), Counter[str]()
        self.served, self.tried, self.uncached = Counter[str](), Counter[str](), Counter[str]()
        self.stale = self.attempts = self.resumes = 0
        self.ttfts_ms: list[int] = []

    def take(self, call: Call) -> None:
        self.outcomes[call.outcome] += 1
        self.stale += call.outcome == calls.CUT and call.reason == calls.VERSION_GONE
        self.attempts += call.attempts
        self.resumes += call.resumes
        self.tried.update(call.tried)
        if call.outcome == calls.GOOD:
            self.fronts[call.frontend] += 1
            self.served[call.served] += 1
            if call.first_s is not None:
                self.ttfts_ms.append(round(1000 * (call.first_s - call.sent_s)))

    def bin(self, at: int, home: str, kind: str) -> Bin:
        return Bin(
            at=at,
            home=home,
            kind=kind,
            outcomes=dict(self.outcomes),
            stale=self.stale,
            attempts=self.attempts,
            resumes=self.resumes,
            ttfts_ms=tuple(self.ttfts_ms),
            fronts=dict(self.fronts),
            served=dict(self.served),
            tried=dict(self.tried),
            uncached=dict(self.uncached),
        )


class Window:
    """The bins of a time, and sums over them. `homes` and `kinds`: those of the callers; None: all."""

    def __init__(
        self,
        bins: Sequence[Bin],
        from_s: float,
        to_s: float,
        homes: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
    ) -> None:
        self.from_s, self.to_s = from_s, to_s
        self.bins = [
            each
            for each in bins
            if from_s <= each.at * BIN_S < to_s
            and (homes is None or each.home in homes)
            and (kinds is None or each.kind in kinds)
        ]

    @property
    def sent(self) -> int:
        """Number of requests."""
        return sum(each.sent for each in self.bins)

    def count(self, *outcomes: str) -> int:
        """Return the number of requests with one of the outcomes."""
        return sum(each.outcomes.get(outcome, 0) for each in self.bins for outcome in outcomes)

    def share(self, *outcomes: str) -> float | None:
        """Return the share of requests with one of the outcomes; None without a request."""
        return self.count(*outcomes) / self.sent if self.sent else None

    def total(self, name: str) -> int:
        """Return the sum of a field: stale, attempts, resumes."""
        return sum(getattr(each, name) for each in self.bins)

    def by_region(self, name: str) -> Counter[str]:
        """Return the sums of a field by region: fronts, served, tried, uncached."""
        found: Counter[str] = Counter()
        for each in self.bins:
            found.update(getattr(each, name))
        return found

    def ttft_ms(self, share: float = 0.95, least: int = 20) -> float | None:
        """Return a quantile of TTFT; None with fewer than `least` values."""
        values = sorted(value for each in self.bins for value in each.ttfts_ms)
        return (
            float(values[min(len(values) - 1, math.ceil(share * len(values)) - 1)])
            if len(values) >= least
            else None
        )
