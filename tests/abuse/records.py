"""The record of one attack: a line of the table, and of --json. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tests.abuse.attack import Outcome
from tests.abuse.bystanders import Call
from tests.chaos.records import Census


class Row(msgspec.Struct, kw_only=True):
    """Actions, observations and violations of one attack."""

    name: str
    about: str
    seconds: float
    """Duration of the attack without the time to settle."""
    did: Mapping[str, int]
    saw: Mapping[str, int]
    calls: int
    """Legitimate calls that were under way during the attack."""
    answered: int
    p99_s: float | None
    """p99 of the answered calls; None without any."""
    late_s: float
    """Longest delay with which the machine woke the legitimate clients."""
    peak_part: str
    """The service with the highest memory."""
    peak_mb: float
    grown_part: str
    """The part with the most growth after the mesh had settled."""
    grown_mb: float
    settled_s: float
    """Time from the end of the attack until the mesh held nothing and memory was back; or the longest wait for that."""
    violations: list[str] = msgspec.field(default_factory=list)

    @property
    def has_held(self) -> bool:
        """True if the mesh kept every bound."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one attack for the judge."""

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
    """Lines with a traceback that services logged during the attack."""
    still_held: str
    """State that the mesh still held after the time to settle; empty: none."""
