"""The definition of an attack: its name, its actions, its volume, and the bounds that the mesh must keep. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc

if TYPE_CHECKING:
    from tests.abuse.target import Target


@dataclass(frozen=True, slots=True)
class Dose:
    """Volume of an attack."""

    count: int
    """Number of the units that the attack counts: streams, bodies, connections."""
    seconds: float
    """Shortest duration of the attack."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that the mesh must keep during an attack. Memory is resident; baselines are taken at the attack's start."""

    peak_mb: float = 256.0
    """Highest memory of any service."""
    engine_growth_mb: float = 96.0
    """Highest growth of an engine or of Redis above its own baseline."""
    after_mb: float = 32.0
    """Growth of any process that is allowed `settle_s` after the attack."""
    settle_s: float = 60.0
    answered: float = 1.0
    """Share of legitimate calls that are answered."""
    refusals: tuple[str, ...] = ()
    """Reasons with which legitimate calls may be refused as well: the mesh cannot tell the attacker from them."""
    p99_s: float = 1.0
    """Longest p99 of legitimate calls, on top of their time on an idle mesh. Judged in the long form alone."""
    is_whole: bool = True
    """Every part serves at the end, and none was restarted."""


@dataclass(slots=True)
class Outcome:
    """Actions and observations of an attack."""

    did: Counter[str] = field(default_factory=Counter)
    """Counts of data sent and connections opened: "streams", "MB", ..."""
    saw: Counter[str] = field(default_factory=Counter)
    """Counts of responses: "UNAUTHENTICATED", "reset", "closed", ..."""
    violations: list[str] = field(default_factory=list)
    """Violations that the attack itself found."""


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of attacks that ran at once, with the violations of each."""
    total = Outcome()
    for outcome in outcomes:
        total.did += outcome.did
        total.saw += outcome.saw
        total.violations += outcome.violations
    return total


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to hurt a mesh."""

    name: str
    about: str
    """Description for a reader of the table: one sentence without counts."""
    run: Callable[[Target, Dose], Awaitable[Outcome]]
    long: Dose
    short: Dose | None
    """None: the attack is not part of the short form."""
    bounds: Bounds = Bounds()


GRPC_CODES: Final[Mapping[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}
"""Names of grpc-status."""
