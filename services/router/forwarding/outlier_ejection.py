"""Whether a replica that is there and answers is trusted with new requests. Pure.

    TRUSTED ── EJECT_AFTER failures in a row ──► EJECTED, for EJECT_MIN_S, twice as long each time, up to EJECT_MAX_S
       ▲                                           │ its time is over
       └── the trial is answered ── TRIAL ◄────────┘ one request at a time; its failure ejects again

Only failures of the replica itself count: no refusal, no fault of a client. What was sent before a failure was noticed and
fails, too, tells nothing new: the many requests of one stall count once. A verdict on a request (a refusal as invalid, a
token id outside the vocabulary) counts once another replica served that request: each one counts, because each request is
evidence of its own. A caller must take an ejected replica all
the same when its role has no other: a pool of two must work, and a pool of one cannot be ejected. A replica that comes back
from a trial is on probation: its next failure ejects it again, a request that ends well forgives everything. Another boot
of the replica's process or of its engine starts clean, as a new Ejection.
"""

from __future__ import annotations

from typing import Final

EJECT_AFTER: Final = 3
EJECT_MIN_S: Final = 1.0
EJECT_MAX_S: Final = 30.0


class OutlierEjection:
    """Of one replica that is known since `since_s`. What was sent before its present state began tells nothing about it."""

    __slots__ = ("_level", "_noticed_s", "_since_s", "failures", "probe", "until_s")

    def __init__(self, since_s: float = float("-inf")) -> None:
        self.failures = 0
        """In a row."""
        self.until_s: float | None = None
        """Ejected at least until then; None: trusted."""
        self._level = 0
        self._since_s = since_s
        self._noticed_s = float("-inf")
        """When the last failure that counted came."""
        self.probe: object | None = None
        """The request that tries it."""

    def __repr__(self) -> str:
        if self.until_s is None:
            return f"Ejection(trusted, {self.failures} failures)"
        return f"Ejection(until {self.until_s:.3f}, {self.failures} failures, probe {self.probe})"

    @property
    def is_ejected(self) -> bool:
        """True until a trial was answered."""
        return self.until_s is not None

    def may_take(self, now_s: float) -> bool:
        """Return whether a new request may go there: it is trusted, or its time is over and no trial runs."""
        return self.until_s is None or (now_s >= self.until_s and self.probe is None)

    def sent(self, request: object, now_s: float) -> bool:
        """`request` goes there; the first one after the time is the trial. Return whether this is one."""
        if self.until_s is None or not self.may_take(now_s):
            return False
        self.probe = request
        return True

    def left(self, request: object) -> bool:
        """`request` is not there any more. Return whether it was a trial: without a verdict it makes room for another."""
        if self.probe is not request:
            return False
        self.probe = None
        return True

    def on_failure(self, sent_s: float, now_s: float) -> bool:
        """The replica failed what was sent to it at `sent_s`. Return whether that ejects it now."""
        if sent_s < max(self._since_s, self._noticed_s):
            return False
        self._noticed_s = now_s
        return self._count(now_s)

    def on_contradiction(self, verdict_s: float, now_s: float) -> bool:
        """Another replica served what this one called invalid at `verdict_s`. Return whether that ejects it now."""
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
        """It began well what was sent to it at `sent_s`. Return whether that readmits it."""
        if sent_s < self._since_s or self.until_s is None:
            return False
        self.until_s, self.probe = None, None
        self.failures = EJECT_AFTER - 1
        return True

    def on_success(self, sent_s: float) -> bool:
        """It ended well what was sent to it at `sent_s`. Return whether that readmits it."""
        if sent_s < self._since_s:
            return False
        was_ejected = self.until_s is not None
        self.until_s, self.probe = None, None
        self.failures = self._level = 0
        return was_ejected
