"""What single engines said of requests themselves: that one is invalid, or shown by a token id outside the vocabulary.

Pure. See cross_check for what follows from a verdict.
"""

from __future__ import annotations

from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from kvmesh.errors import MeshError

Tester = TypeVar("Tester")
"""A request that tests verdicts."""

Role: TypeAlias = Literal["prefill", "decode"]

DOUBT_S: Final = 10.0
"""For so long a contradiction pays for contesting verdicts of the replica, and a confirmation lets none of them wait."""


class Verdict(NamedTuple):
    """One verdict on one request."""

    replica: str
    role: Role
    fault: str
    error: MeshError
    """What the client gets if it is final."""
    can_cross_check: bool
    """Another replica of the role can be asked."""
    at_s: float


class Verdicts(Generic[Tester]):
    """What became of the verdicts of each replica, in all requests of a frontend."""

    def __init__(self) -> None:
        self.cross_checks_total = 0
        self.contradicted_total = 0
        self.confirmed_total = 0
        self.unpaid_total = 0
        """Verdicts that were final because the retry budget was empty."""
        self.testers: dict[str, set[Tester]] = {}
        """Requests that test a verdict of the replica now."""
        self._doubted_s: dict[str, float] = {}
        self._confirmed_s: dict[str, float] = {}

    def is_doubted(self, replica: str, now_s: float) -> bool:
        """True if a verdict of `replica` was contradicted a moment ago."""
        return _is_recent(self._doubted_s, replica, now_s)

    def is_undecided(self, replica: str, now_s: float) -> bool:
        """True if a verdict of `replica` is being tested, and none was confirmed a moment ago."""
        return bool(self.testers.get(replica)) and not _is_recent(self._confirmed_s, replica, now_s)

    def opened(self, request: Tester, replica: str) -> None:
        """`request` tests a verdict of `replica`."""
        self.cross_checks_total += 1
        self.testers.setdefault(replica, set()).add(request)

    def confirmed(self, replica: str, now_s: float) -> None:
        """Another replica said the same as `replica`."""
        self.confirmed_total += 1
        _note(self._confirmed_s, replica, now_s)

    def contradicted(self, replica: str, now_s: float) -> None:
        """Another replica served what `replica` called invalid."""
        self.contradicted_total += 1
        _note(self._doubted_s, replica, now_s)

    def closed(self, request: Tester, replica: str) -> None:
        """`request` tests nothing of `replica` any more."""
        testers = self.testers.get(replica, set())
        testers.discard(request)
        if not testers:
            self.testers.pop(replica, None)


def _note(times: dict[str, float], replica: str, now_s: float) -> None:
    """Set the time of `replica`; forget those that are over."""
    for name in [name for name in times if not _is_recent(times, name, now_s)]:
        del times[name]
    times[replica] = now_s


def _is_recent(times: dict[str, float], replica: str, now_s: float) -> bool:
    """Return whether `replica` has a time in the last DOUBT_S."""
    return now_s - times.get(replica, float("-inf")) <= DOUBT_S
