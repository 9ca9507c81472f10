"""The result of a check. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

FALLBACK: Final = "; fallback: "
"""Stands between the reason of NOT_OFFERED and what kvmesh does instead."""


class Outcome(Enum):
    """Results of a check. Only FAIL makes the exit status 1."""

    PASS = "pass"
    FAIL = "fail"
    NOT_OFFERED = "not offered"
    """The engine lacks the capability. The reason names the fallback of kvmesh."""
    NOT_JUDGED = "not judged"
    """The check could not be run safely, or other requests ran meanwhile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One result with its reason. The reason of a pass has the figures that were seen."""

    outcome: Outcome
    why: str


class Judged(Exception):
    """Ends a check early with `verdict`."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    capability: str
    check: str
    verdict: Verdict
    seconds: float


def passed(why: str) -> Verdict:
    """Return a pass."""
    return Verdict(Outcome.PASS, why)


def failed(why: str) -> Verdict:
    """Return a fail."""
    return Verdict(Outcome.FAIL, why)


def not_offered(why: str, fallback: str) -> Verdict:
    """Return the verdict on a missing capability, with what kvmesh does instead."""
    return Verdict(Outcome.NOT_OFFERED, f"{why}{FALLBACK}{fallback}")


def not_judged(why: str) -> Verdict:
    """Return the verdict of a check that was not run to its end."""
    return Verdict(Outcome.NOT_JUDGED, why)


def judged(fault: str, why: str) -> Verdict:
    """Return a fail with `fault`, or a pass with `why` if `fault` is empty."""
    return failed(fault) if fault else passed(why)


def has_failed(rows: list[Row]) -> bool:
    """True if a check failed."""
    return any(row.verdict.outcome is Outcome.FAIL for row in rows)
