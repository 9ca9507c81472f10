"""The record of one attack: a line of the table, and of --json. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tests.abuse.attack import Outcome
from tests.abuse.bystanders import Call
from tests.chaos.records import Census


class Row(msgspec.Struct, kw_only=True):
    """What was done, what was seen, what is wrong."""

    name: str
    about: str
    seconds: float
    """How long the attack took; the time to settle comes on top."""
    did: Mapping[str, int]
    saw: Mapping[str, int]
    calls: int
    """Legitimate calls that were under way at some time of it."""
    answered: int
    p99_s: float | None
    """Of the answered ones; None without any."""
    late_s: float
    """How late the machine woke the legitimate clients up, at most."""
    peak_part: str
    """The service whose memory was highest."""
    peak_mb: float
    grown_part: str
    """The part that had grown most when all had settled."""
    grown_mb: float
    settled_s: float
    """From the end of the attack until nothing was held and memory was back; or how long was waited for that."""
    violations: list[str] = msgspec.field(default_factory=list)

    @property
    def has_held(self) -> bool:
        """True if the mesh kept every bound."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one attack left for the judge."""

    outcome: Outcome
    calls: Sequence[Call]
    truth: Mapping[int, Sequence[int]]
    """The right tokens by number of the call."""
    before: Census
    after: Census
    start_mb: Mapping[str, float]
    peak_mb: Mapping[str, float]
    after_mb: Mapping[str, float]
    tracebacks: Sequence[str]
    """Lines of the services' logs with a traceback, that came meanwhile."""
    still_held: str
    """What the mesh held after the time to settle; empty: nothing."""
