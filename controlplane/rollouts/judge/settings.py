"""Settings of the judge and of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HALF_PERCENT: Final = 50.0
"""At this weight the comparison arm is stable."""
WHOLE_PERCENT: Final = 100.0
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Bounds of the judge. Raises ValueError for a value out of range."""

    alpha: float = 5e-4
    """Error probability of each gate at each look."""
    looks: tuple[int, ...] = (50, 100, 200, 400, 800)
    """Canary sessions of the step at each look."""
    look_every: int = 800
    """Sessions between the looks after those."""
    error_difference: float = 0.005
    """Share of sessions; a smaller difference does not fail."""
    error_difference_needed: float = 0.025
    """Before 50 %, the upper 99 % bound of the difference is below this."""
    latency_ratio: float = 1.05
    """TTFT and gap fail if they are higher than this times the comparison arm's."""
    computed_ratio: float = 1.1
    """The computed share of prompt tokens fails if it is higher than this times the comparison arm's."""
    earlier_ratio: float = 1.25
    """In place of both ratios above 50 %, where the comparison arm is stable as it was before, under less load."""
    ratio_needed: float = 1.25
    """Before 50 %, the upper 99 % bound of the ratio is below this."""
    informative_min: int = 20
    """Sessions of each arm in common strata that a rank test needs."""
    sessions_max: int = 4_096
    """Sessions of a track that are kept, chosen by hash."""
    hang_age_s: float = 10.0
    hang_requests_min: int = 10
    """So many requests of the canary without a token for `hang_age_s` are a hang, if they are 5 % of those open."""
    leak_bytes_min: int = 64 * MIB
    """A leak has grown by so much."""
    leak_window_s: float = 60.0
    """Time that the readings of a leak span."""
    ttft_p95_max_s: float | None = None
    """Absolute bound at 100 %, for the mean TTFT of sessions."""
    error_share_max: float | None = None
    """Absolute bound at 100 %, for the share of sessions with an error."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first value out of range."""
        _within("alpha", self.alpha, 1e-9, 5e-4)
        if not self.looks or any(
            low >= high for low, high in zip((0, *self.looks), self.looks, strict=False)
        ):
            raise ValueError(f"looks are {self.looks}; rising numbers from 1 on are allowed")
        _within("look_every", self.look_every, 1, 1_000_000)
        _within("error_difference", self.error_difference, 0.0, 1.0)
        _within("error_difference_needed", self.error_difference_needed, 0.0, 1.0)
        for name in ("latency_ratio", "computed_ratio", "earlier_ratio", "ratio_needed"):
            _within(name, getattr(self, name), 1.0, 10.0)
        _within("informative_min", self.informative_min, 2, self.looks[0])
        _within("sessions_max", self.sessions_max, 100, 100_000)
        _within("hang_age_s", self.hang_age_s, 0.1, 3_600.0)
        _within("hang_requests_min", self.hang_requests_min, 2, 1_000_000)
        _within("leak_bytes_min", self.leak_bytes_min, 1, 1 << 40)
        _within("leak_window_s", self.leak_window_s, 1.0, 86_400.0)
        if self.ttft_p95_max_s is not None:
            _within("ttft_p95_max_s", self.ttft_p95_max_s, 1e-6, 86_400.0)
        if self.error_share_max is not None:
            _within("error_share_max", self.error_share_max, 0.0, 1.0)

    def look_after(self, sessions: int) -> int:
        """Return the number of canary sessions of the first look above `sessions`."""
        for look in self.looks:
            if look > sessions:
                return look
        beyond = (sessions - self.looks[-1]) // self.look_every + 1
        return self.looks[-1] + beyond * self.look_every


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the rollout."""

    index: int
    """From 1 in a rollout."""
    weight_percent: float
    """Of the canary."""
    has_baseline: bool = False
    """A baseline pool takes the same weight."""
    is_restricted: bool = False
    """Some tenants take no part in the rollout. Stable has them too, so its load is unlike at any weight."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        _within("step.index", self.index, 0, 1_000)
        _within("step.weight_percent", self.weight_percent, 0.0, WHOLE_PERCENT)

    @property
    def is_before_half(self) -> bool:
        """Whether the bounds that are needed before 50 % are counted in this step."""
        return self.weight_percent < HALF_PERCENT

    @property
    def is_past_half(self) -> bool:
        """Whether the comparison arm is stable as it was at 50 % or less."""
        return self.weight_percent > HALF_PERCENT


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; {low:g} to {high:g} is allowed")
