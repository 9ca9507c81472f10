"""Chooses the pool of a session by the weights of a snapshot. Pure.

A session has a fixed position u in [0, 1) for each rollout: the canary has the sessions with u < w, the baseline those
with u >= 1 - b, stable those between. So a rising weight moves each session to the canary at most once, and a rollback
moves it back once. Two rollouts choose their sessions independently.
"""

from __future__ import annotations

from typing import Final

import xxhash

from kvmesh.snapshot.content import WEIGHT_SUM_PERCENT, Content, PoolTrack, Track

SPAN: Final = 1 << 64
"""Positions are integers in [0, SPAN)."""


def session_hash(tenant: str, session: str) -> int:
    """Return the 64-bit hash by which observations name a tenant's session. `session`: its id, or the request id."""
    return xxhash.xxh3_64_intdigest(f"{tenant}\0{session}".encode())


class Assignment:
    """The choice under one content. Built once for each snapshot, asked once for each request."""

    __slots__ = (
        "_baseline",
        "_baseline_from",
        "_canary",
        "_canary_below",
        "_is_split",
        "_seed",
        "content",
        "stable",
    )

    def __init__(self, content: Content) -> None:
        self.content = content
        self.stable: PoolTrack = content.stable
        self._canary = content.of_track(Track.CANARY)
        self._baseline = content.of_track(Track.BASELINE)
        self._canary_below = _share(self._canary)
        self._baseline_from = SPAN - _share(self._baseline)
        self._is_split = bool(_share(self._canary) or _share(self._baseline))
        self._seed = xxhash.xxh3_64_intdigest(content.rollout.encode())

    def position(self, tenant: str, session: str) -> int:
        """Return the position of a session in [0, SPAN)."""
        return xxhash.xxh3_64_intdigest(f"{tenant}\0{session}".encode(), self._seed)

    def choose(self, tenant: str, session: str) -> PoolTrack:
        """Return the pool for a new request of `tenant` in `session`: its id, or the request id without one."""
        if not self._is_split or not self.may_leave(tenant):
            return self.stable
        u = xxhash.xxh3_64_intdigest(f"{tenant}\0{session}".encode(), self._seed)
        if u < self._canary_below and self._canary is not None:
            return self._canary
        if u >= self._baseline_from and self._baseline is not None:
            return self._baseline
        return self.stable

    def may_leave(self, tenant: str) -> bool:
        """True if the rollout's settings allow `tenant` in canary and baseline."""
        content = self.content
        if tenant in content.never_tenants:
            return False
        return not content.only_tenants or tenant in content.only_tenants


def _share(pool: PoolTrack | None) -> int:
    """Return the part of SPAN that the weight of `pool` covers."""
    return 0 if pool is None else SPAN * pool.weight_percent // WEIGHT_SUM_PERCENT
