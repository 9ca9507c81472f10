"""Outlier ejection: a circuit breaker per replica. An ejected replica gets no new requests. Pure.

    CLOSED ── EJECT_AFTER consecutive failures ──► OPEN (ejected) for EJECT_MIN_S, doubled each time up to EJECT_MAX_S
       ▲                                            │ the time is over
       └── the probe is answered ── HALF-OPEN ◄─────┘ one request at a time as the probe; its failure ejects again

Only failures that the replica caused count: no refusal, no error of a client. A failure of a request that was sent before
the last counted failure was noticed does not count: the many requests of one stall count once. A verdict on a request (a
refusal as invalid, a token id outside the vocabulary) counts once a second replica has served that request. Each verdict
counts, because each request is evidence of its own. The router keeps at least half of a role in use, ejected or not
(`trusted` in eligible_replicas.py), so that a pool of one always has its replica. After a good probe the replica is on
probation: its next failure ejects it again, and a request that ends well resets all counts. Another boot of the
replica's process or of its engine starts with a new OutlierEjection.
"""

from __future__ import annotations

from typing import Final

EJECT_AFTER: Final = 3
EJECT_MIN_S: Final = 1.0
EJECT_MAX_S: Final = 30.0


class OutlierEjection:
    """The ejection state of one replica. Requests sent before the last ejection or `since_s` do not count."""

    __slots__ = ("_level", "_noticed_s", "_since_s", "failures", "probe", "until_s")

    def __init__(self, since_s: float = float("-inf")) -> None:
        self.failures = 0
        """Consecutive failures."""
        self.until_s: float | None = None
        """End of the open state, in which no request is sent. None: closed."""
        self._level = 0
        self._since_s = since_s
        self._noticed_s = float("-inf")
        """Time of the last failure that counted."""
        self.probe: object | None = None
        """The request that is the half-open probe."""

    def __repr__(self) -> str:
        if self.until_s is None:
            return f"OutlierEjection(closed, {self.failures} failures)"
        return f"OutlierEjection(until {self.until_s:.3f}, {self.failures} failures, probe {self.probe})"

    @property
    def is_ejected(self) -> bool:
        """True until a probe was answered well."""
        return self.until_s is not None

    def may_take(self, now_s: float) -> bool:
        """Return whether the replica may get a new request: closed, or `until_s` has passed and no probe runs."""
        return self.until_s is None or (now_s >= self.until_s and self.probe is None)

    def on_sent(self, request: object, now_s: float) -> bool:
        """Note that `request` is sent. Return True if it is the half-open probe: the first one after `until_s`."""
        if self.until_s is None or not self.may_take(now_s):
            return False
        self.probe = request
        return True

    def on_left(self, request: object) -> bool:
        """Note that `request` has left the replica. Return True if it was the probe: another may follow."""
        if self.probe is not request:
            return False
        self.probe = None
        return True

    def on_failure(self, sent_s: float, now_s: float) -> bool:
        """Count a failure of a request that was sent at `sent_s`. Return True if that ejects the replica now."""
        if sent_s < max(self._since_s, self._noticed_s):
            return False
        self._noticed_s = now_s
        return self._count(now_s)

    def on_contradiction(self, verdict_s: float, now_s: float) -> bool:
        """Count a contradicted verdict of `verdict_s`. Return True if that ejects the replica now."""
        return verdict_s >= self._since_s and self._count(now_s)

    def _count(self, now_s: float) -> bool:
        self.failures += 1
        is_late = self.until_s is not None and now_s < self.until_s
        if is_late or self.failures < EJECT_AFTER:
            return False
        self._since_s = now_s
        self.until_s = now_s + min(EJECT_MAX_S, EJECT_MIN_S * 2**self._level)
        self._level = min(self._level + 1, 8)
        self.probe = None
        return True

    def on_answer(self, sent_s: float) -> bool:
        """Count a good start of a request that was sent at `sent_s`. Return True if that closes the circuit."""
        if sent_s < self._since_s or self.until_s is None:
            return False
        self.until_s, self.probe = None, None
        self.failures = EJECT_AFTER - 1
        return True

    def on_success(self, sent_s: float) -> bool:
        """Count a good end of a request that was sent at `sent_s`. Return True if that closes the circuit."""
        if sent_s < self._since_s:
            return False
        was_ejected = self.until_s is not None
        self.until_s, self.probe = None, None
        self.failures = self._level = 0
        return was_ejected
