"""The replicas at which attempts of a request have just failed: the next attempt avoids them, cached or not. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

REMEMBER_S: Final = 10.0
REMEMBERED_MAX: Final = 4096


class FailedReplicas:
    """Names of replicas by request id, for REMEMBER_S after the last failure. When full, the oldest entry goes."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, frozenset[str]]] = {}
        """In the order of expiry: end of the entry, and the names."""

    def __len__(self) -> int:
        return len(self._failed)

    def add(self, request_id: str, replicas: Iterable[str], now_s: float) -> None:
        """Note that an attempt of the request failed at `replicas`."""
        names = self.of(request_id, now_s) | frozenset(replicas)
        self._failed.pop(request_id, None)
        self._failed[request_id] = (now_s + REMEMBER_S, names)
        while self._failed:
            oldest = next(iter(self._failed))
            if len(self._failed) <= REMEMBERED_MAX and self._failed[oldest][0] > now_s:
                break
            del self._failed[oldest]

    def of(self, request_id: str, now_s: float) -> frozenset[str]:
        """Return the replicas at which the request failed."""
        until_s, names = self._failed.get(request_id, (now_s, frozenset[str]()))
        return names if until_s > now_s else frozenset()
