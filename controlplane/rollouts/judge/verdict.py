"""Verdicts of the judge, with every number that decided. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.rollouts.judge.observation import Track


class GateState(StrEnum):
    """The state of a gate."""

    PASS = "pass"
    FAIL = "fail"
    NEEDS_MORE = "needs_more"
    """Too few samples yet."""
    INCONCLUSIVE = "inconclusive"
    """More samples of the same kind would not help."""
    NOT_APPLICABLE = "not_applicable"


class VerdictKind(StrEnum):
    """The result of a look."""

    PASS = "pass"
    """So far: nothing fails, and nothing is missing."""
    NEEDS_MORE = "needs_more"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class StratumCount:
    """Sessions of both arms in a stratum."""

    name: str
    canary: int
    comparison: int


@dataclass(frozen=True, slots=True)
class GateReport:
    """A gate's result."""

    gate: str
    state: GateState
    reason: str
    """In plain words."""
    figure: float | None = None
    bound: float | None = None
    """The canary fails beyond it."""
    p: float | None = None
    alpha: float | None = None
    canary_samples: int = 0
    comparison_samples: int = 0
    strata: tuple[StratumCount, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """A bound that must hold before the canary gets 50 %."""

    name: str
    figure: float | None
    """Upper 99 % bound, over the steps so far. None: the samples give none."""
    bound: float
    is_met: bool
    reason: str

    @property
    def gate(self) -> str:
        """Gate that the bound belongs to, for example "errors"."""
        return self.name.partition(", ")[0]

    @property
    def measure(self) -> str:
        """The measure that is bounded, for example "upper 99 % bound of the ratio"."""
        return self.name.partition(", ")[2]


@dataclass(frozen=True, slots=True)
class ArmReport:
    """Requests of a track in the step."""

    track: Track
    sessions: int
    """Samples. Estimated once the bound of kept sessions is exceeded."""
    ok: int
    client: int
    """Errors that clients caused. Shown, not judged."""
    failed: int
    error_sessions: int
    """Sessions with an error that counts, also one that a retry hid. Estimated as `sessions`."""
    open: int
    dropped: int
    output_tokens_mean: float | None
    """Shown, not judged."""
    finish_reasons: tuple[tuple[str, int], ...]
    """Shown, not judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement at one time."""

    kind: VerdictKind
    at_s: float
    step: int
    weight_percent: float
    baked_s: float
    """Time in this step."""
    looks: int
    """Looks spent in this step."""
    is_look: bool
    """Whether this verdict spent a look."""
    comparison: str
    """The comparison arm, in words."""
    is_weaker: bool
    """The comparison arm is not a baseline as small and as young as the canary."""
    arms: tuple[ArmReport, ...]
    gates: tuple[GateReport, ...]
    needs: tuple[Need, ...]
    """Empty from 50 % on."""
    reason: str
    """In plain words."""

    @property
    def is_ready_for_half(self) -> bool:
        """Whether every bound that is needed before 50 % holds."""
        return all(need.is_met for need in self.needs)


@dataclass(frozen=True, slots=True)
class Status:
    """What `rollout status` shows of the judge."""

    verdict: Verdict
    """Of the last look, with the gates that need no look as they are now."""
    arms: tuple[ArmReport, ...]
    """Now."""
    next_look_sessions: int
    """Canary sessions of the step at which the next look is due."""
    missing_sessions: int
    """Until then."""
    since_observation_s: float | None
    """None: there was no batch yet."""
    silent_frontends: tuple[str, ...]
    """Frontends without a batch for 30 s."""
