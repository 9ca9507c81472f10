"""Impairments of the paths between the sites of a link. Pure.

A path leads from one site to another one, so each pair of sites has two. A new impairment replaces the earlier one of its
kind: `slow` keeps a cut, and `cut` keeps delay and loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

DELAY_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class Impairment:
    """The faults of one path."""

    delay_s: float = 0.0
    """Delay of every packet, in seconds. A round trip takes the delays of both paths."""
    loss: float = 0.0
    """Share of packets lost, 0 to 1."""
    is_cut: bool = False
    """Every packet is lost."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= DELAY_S_MAX:
            raise ValueError(f"delay_s = {self.delay_s:g}: allowed are 0 to {DELAY_S_MAX:g} s")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss = {self.loss:g}: allowed are 0 to 1")


HEALTHY: Final = Impairment()


@dataclass(frozen=True, slots=True)
class Impairments:
    """The impairments of all paths. Every method returns a changed copy, and raises ValueError for an unknown site."""

    sites: tuple[str, ...]
    of: Mapping[tuple[str, str], Impairment] = field(default_factory=dict)
    """By source and target. A path that is not listed is healthy."""

    def slow(
        self, a: str, b: str, delay_s: float, loss: float = 0.0, *, is_directed: bool = False
    ) -> Impairments:
        """Delay each packet between `a` and `b`, and lose a share of them. `is_directed`: only those from `a` to `b`."""
        return self._changed(self._paths(a, b, is_directed), delay_s=delay_s, loss=loss)

    def cut(self, a: str, b: str, *, is_directed: bool = False) -> Impairments:
        """Lose each packet between `a` and `b`. `is_directed`: only those from `a` to `b`."""
        return self._changed(self._paths(a, b, is_directed), is_cut=True)

    def isolate(self, site: str) -> Impairments:
        """Lose each packet between `site` and all other sites."""
        self._check(site)
        return self._changed([path for path in self.paths() if site in path], is_cut=True)

    def heal(self, *sites: str) -> Impairments:
        """Remove all impairments of the paths between `sites`; without sites, of all paths."""
        self._check(*sites)
        kept = {
            path: impairment for path, impairment in self.of.items() if sites and not set(path) <= {*sites}
        }
        return replace(self, of=kept)

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield source and target of every path."""
        return ((a, b) for a in self.sites for b in self.sites if a != b)

    def on(self, source: str, target: str) -> Impairment:
        """Return the impairment of one path."""
        return self.of.get((source, target), HEALTHY)

    def _paths(self, a: str, b: str, is_directed: bool) -> list[tuple[str, str]]:
        self._check(a, b)
        if a == b:
            raise ValueError(f'no path leads from site "{a}" to itself')
        return [(a, b)] if is_directed else [(a, b), (b, a)]

    def _check(self, *sites: str) -> None:
        for site in sites:
            if site not in self.sites:
                raise ValueError(f'site "{site}" is unknown: the link has {", ".join(self.sites)}')

    def _changed(self, paths: list[tuple[str, str]], **changes: float | bool) -> Impairments:
        changed = {path: replace(self.on(*path), **changes) for path in paths}  # type: ignore[arg-type]
        return replace(self, of={**self.of, **changed})
