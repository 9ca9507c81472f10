"""Verdicts of single engines on requests: a refusal as invalid, or a token id outside the vocabulary.

Pure. `cross_check` decides the effect of a verdict.
"""

from __future__ import annotations

from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from kvmesh.errors import MeshError

Tester = TypeVar("Tester")
"""A request that tests verdicts."""

Role: TypeAlias = Literal["prefill", "decode"]

DOUBT_S: Final = 10.0
"""Time after a contradiction in which cross-checks of the replica's verdicts take nothing from the retry budget.

For the same time after a confirmation, no verdict of the replica waits for the cross-check of another request.
"""


class Verdict(NamedTuple):
    """One verdict on one request."""

    replica: str
    """Name of the replica, "region/name" in another region."""
    role: Role
    fault: str
    error: MeshError
    """Error for the client if the verdict is final."""
    can_cross_check: bool
    """True if another replica of the role can test the verdict."""
    at_s: float


class Verdicts(Generic[Tester]):
    """Results of the verdicts of each replica, over all requests of a frontend."""

    def __init__(self) -> None:
        self.cross_checks_total = 0
        self.contradicted_total = 0
        self.confirmed_total = 0
        self.unpaid_total = 0
        """Verdicts that were final because the upper half of the retry budget was empty."""
        self.testers: dict[str, set[Tester]] = {}
        """Requests that now test a verdict of the replica."""
        self._doubted_s: dict[str, float] = {}
        self._confirmed_s: dict[str, float] = {}

    def is_doubted(self, replica: str, now_s: float) -> bool:
        """True if a verdict of `replica` was contradicted in the last DOUBT_S."""
        return _is_recent(self._doubted_s, replica, now_s)

    def is_undecided(self, replica: str, now_s: float) -> bool:
        """True if a request tests a verdict of `replica`, and none was confirmed in the last DOUBT_S."""
        return bool(self.testers.get(replica)) and not _is_recent(self._confirmed_s, replica, now_s)

    def opened(self, request: Tester, replica: str) -> None:
        """Note that `request` tests a verdict of `replica`."""
        self.cross_checks_total += 1
        self.testers.setdefault(replica, set()).add(request)

    def confirmed(self, replica: str, now_s: float) -> None:
        """Note that another replica confirmed a verdict of `replica`."""
        self.confirmed_total += 1
        _note(self._confirmed_s, replica, now_s)

    def contradicted(self, replica: str, now_s: float) -> None:
        """Note that another replica served a request that `replica` called invalid."""
        self.contradicted_total += 1
        _note(self._doubted_s, replica, now_s)

    def closed(self, request: Tester, replica: str) -> None:
        """Note that `request` no longer tests a verdict of `replica`."""
        testers = self.testers.get(replica, set())
        testers.discard(request)
        if not testers:
            self.testers.pop(replica, None)


def _note(times: dict[str, float], replica: str, now_s: float) -> None:
    """Set the time of `replica`; forget times before the last DOUBT_S."""
    for name in [name for name in times if not _is_recent(times, name, now_s)]:
        del times[name]
    times[replica] = now_s


def _is_recent(times: dict[str, float], replica: str, now_s: float) -> bool:
    """Return True if `replica` has a time in the last DOUBT_S."""
    return now_s - times.get(replica, float("-inf")) <= DOUBT_S
