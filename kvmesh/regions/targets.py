"""The region of a session under the shares of spill: sticky, stable, without state. Pure.

A session has a fixed position in [0, SPAN). Each target region has an interval as long as its share, at an anchor of its
own: the first at the lower end, the last at the upper end, others evenly between. Home has the rest. So a share that grows
takes sessions from home alone, as long as its interval meets no other. With at most two targets that always holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import xxhash

SPAN: Final = 1 << 64
"""Positions are integers in [0, SPAN)."""

SEED: Final = xxhash.xxh3_64_intdigest(b"regions")
"""Positions are independent of those of a rollout."""


def position(tenant: str, session: str) -> int:
    """Return the position of a tenant's session: its id, or the request id without one."""
    return xxhash.xxh3_64_intdigest(f"{tenant}\0{session}".encode(), SEED)


class Targets:
    """The choice under one set of shares. Built once for each change of them, asked once for each request."""

    __slots__ = ("_intervals", "home")

    def __init__(self, home: str, others: Sequence[str], shares: Mapping[str, float]) -> None:
        """`others`: all other regions, also those without a share. Shares sum to at most 1, up to rounding."""
        self.home = home
        self._intervals = _intervals(sorted(others), shares)

    def choose(self, at: int, allowed: Sequence[str] | None = None) -> str:
        """Return the region of the session at position `at`.

        `allowed` are the regions of a pinned tenant. Its session stays at home where its target is not allowed, so home
        is the answer even where home itself is not allowed: the caller refuses such a request.
        """
        for region, start, end in self._intervals:
            if start <= at < end:
                return region if allowed is None or region in allowed else self.home
        return self.home


def _intervals(regions: Sequence[str], shares: Mapping[str, float]) -> list[tuple[str, int, int]]:
    """Return (region, start, end) in order and without overlap. Shares beyond a sum of 1 are cut at the last regions."""
    lengths: list[int] = []
    for region in regions:
        wanted = int(SPAN * min(1.0, max(0.0, shares.get(region, 0.0))))
        lengths.append(min(wanted, SPAN - sum(lengths)))
    last = max(1, len(regions) - 1)
    starts = [(SPAN - length) * place // last for place, length in enumerate(lengths)]
    for place in range(1, len(starts)):
        starts[place] = max(starts[place], starts[place - 1] + lengths[place - 1])
    limit = SPAN
    for place in reversed(range(len(starts))):
        starts[place] = min(starts[place], limit - lengths[place])
        limit = starts[place]
    return [
        (region, start, start + length)
        for region, start, length in zip(regions, starts, lengths, strict=True)
        if length
    ]
