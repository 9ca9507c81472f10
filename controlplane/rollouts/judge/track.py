"""Sufficient statistics of one track: totals by session, bounded, mergeable and in JSON. Pure.

At most `sessions_max` sessions are kept, those with the lowest keys. A key is a hash, so they are a uniform sample. A
session above the limit is never taken again, so each kept session is complete. The result depends neither on the order
of the requests nor on the frontend that reports them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.rollouts.judge.observation import CLIENT, OK, RequestEnd
from controlplane.rollouts.judge.session import KEY_MAX, SessionTotals

SLACK: Final = 1.25
"""Sessions over the bound before those with the highest keys are left out."""
FINISH_REASONS_MAX: Final = 16
OTHER: Final = "other"


class RequestCounts(msgspec.Struct):
    """Requests of a track, for reports. Nothing is judged by them."""

    ok: int = 0
    client: int = 0
    failed: int = 0
    output_tokens: int = 0
    two_tokens: int = 0
    """Requests that ended well with at least two tokens, so with a gap."""
    finish_reasons: dict[str, int] = {}

    def add(self, end: RequestEnd) -> None:
        """Count a request."""
        self.output_tokens += end.output_tokens
        if end.outcome == OK:
            self.ok += 1
            self.two_tokens += end.output_tokens >= 2
            self._finished(end.finish_reason, 1)
        elif end.outcome == CLIENT:
            self.client += 1
        else:
            self.failed += 1

    def merge(self, other: RequestCounts) -> None:
        """Add the counts of another observer."""
        self.ok += other.ok
        self.client += other.client
        self.failed += other.failed
        self.output_tokens += other.output_tokens
        self.two_tokens += other.two_tokens
        for reason, number in other.finish_reasons.items():
            self._finished(reason, number)

    def _finished(self, reason: str, number: int) -> None:
        is_known = reason in self.finish_reasons or len(self.finish_reasons) < FINISH_REASONS_MAX
        name = reason if is_known else OTHER
        self.finish_reasons[name] = self.finish_reasons.get(name, 0) + number


class TrackStatistics(msgspec.Struct):
    """The statistics of one track in one step.

    INVARIANT: `sessions` has every seen session with a key of at most `key_max`, complete, and no other.
    """

    sessions_max: int
    key_max: int = KEY_MAX
    sessions: dict[int, SessionTotals] = {}
    requests: RequestCounts = msgspec.field(default_factory=RequestCounts)

    def add(self, key: int, end: RequestEnd) -> None:
        """Add a request of the session with this key."""
        self.requests.add(end)
        if key > self.key_max:
            return
        totals = self.sessions.get(key)
        if totals is None:
            totals = SessionTotals()
            totals.add(end)
            if totals.has_evidence:
                self.sessions[key] = totals
                if len(self.sessions) > self.sessions_max * SLACK:
                    self.trim(self.sessions_max)
            return
        totals.add(end)

    def merge(self, other: TrackStatistics) -> None:
        """Add the statistics of another observer. `other` stays as it is."""
        self.requests.merge(other.requests)
        self.key_max = min(self.key_max, other.key_max)
        for key, totals in other.sessions.items():
            if key > self.key_max:
                continue
            own = self.sessions.get(key)
            if own is None:
                own = self.sessions[key] = SessionTotals()
            own.merge(totals)
        self._drop()
        self.trim(self.sessions_max)

    def trim(self, sessions_max: int) -> None:
        """Keep at most `sessions_max` sessions."""
        if len(self.sessions) > sessions_max:
            self.key_max = sorted(self.sessions)[sessions_max - 1]
            self._drop()

    def copy(self) -> TrackStatistics:
        """Return equal statistics that share nothing with these."""
        made = TrackStatistics(self.sessions_max)
        made.merge(self)
        return made

    def session_count(self) -> int:
        """Return the number of sessions seen, estimated from the kept ones once some were left out."""
        return self._estimated(len(self.sessions))

    def error_session_count(self) -> int:
        """Return the number of sessions with an error that counts, estimated in the same way."""
        return self._estimated(sum(bool(each.errors) for each in self.sessions.values()))

    def _estimated(self, kept: int) -> int:
        return kept if self.key_max == KEY_MAX else round(kept * (KEY_MAX / max(self.key_max, 1)))

    def _drop(self) -> None:
        """Leave out the sessions above `key_max`."""
        if any(key > self.key_max for key in self.sessions):
            self.sessions = {key: each for key, each in self.sessions.items() if key <= self.key_max}
