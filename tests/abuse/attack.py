"""What an attack is: its name, what it does, how much of it, and the bounds that the mesh must keep meanwhile. Pure."""

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
    """How much of an attack."""

    count: int
    """Of what the attack counts: streams, bodies, connections."""
    seconds: float
    """How long it is kept up, at least."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the mesh must keep while it is attacked. Memory is resident; baselines are those of the attack's start."""

    peak_mb: float = 256.0
    """Highest memory of any service."""
    engine_growth_mb: float = 96.0
    """Highest growth of an engine or of Redis: their baselines are theirs."""
    after_mb: float = 32.0
    """Growth of any process that may stay, `settle_s` after the attack."""
    settle_s: float = 60.0
    answered: float = 1.0
    """Share of legitimate calls that are answered."""
    refusals: tuple[str, ...] = ()
    """Reasons with which legitimate calls may be refused as well: who attacks is one of them to the mesh."""
    p99_s: float = 1.0
    """Of legitimate calls, on top of what they take on an idle mesh. Judged in the long form alone."""
    is_whole: bool = True
    """Every part serves at the end, and none was started anew."""


@dataclass(slots=True)
class Outcome:
    """What an attack did and saw."""

    did: Counter[str] = field(default_factory=Counter)
    """What was sent or opened: "streams", "MB", ..."""
    saw: Counter[str] = field(default_factory=Counter)
    """How it was answered: "UNAUTHENTICATED", "reset", "closed", ..."""
    violations: list[str] = field(default_factory=list)
    """What the attack itself found wrong."""


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of attacks that ran at once, with what each of them found wrong."""
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
    """What it does, for a reader of the table: one sentence without its counts."""
    run: Callable[[Target, Dose], Awaitable[Outcome]]
    long: Dose
    short: Dose | None
    """None: it is not part of the short form."""
    bounds: Bounds = Bounds()


GRPC_CODES: Final[Mapping[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}
"""Names of grpc-status."""
