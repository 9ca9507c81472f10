"""Turns of conversations as a client saw them, and the figures of a rollout over them. Pure.

Times are Unix time. A turn is bad if it ended with an error, had a wrong token, or had no token for SILENCE_S. Clients
never cancel, so no error is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.results import quantile

SILENCE_S: Final = 10.0
"""A turn without a token for this long is bad."""

BOUND_FACTOR: Final = 1.2
HANG_OPEN: Final = 10
"""The time to weight 0 of a hang counts from this open request on."""


class Turn(NamedTuple):
    """One turn."""

    session: int
    number: int
    """In its session, from 0."""
    version: str
    """Model version that answered. Empty: none began to."""
    arrived_s: float
    ended_s: float
    ttft_s: float | None
    silent_s: float
    """Longest time without a token."""
    silent_from_s: float
    """Begin of that time."""
    error: str
    """Reason of the error. Empty: none."""
    is_wrong: bool
    prompt_tokens: int
    cached_tokens: int

    @property
    def is_silent(self) -> bool:
        """True if the turn had no token for SILENCE_S."""
        return self.silent_s >= SILENCE_S

    @property
    def is_bad(self) -> bool:
        """See the module."""
        return bool(self.error) or self.is_wrong or self.is_silent


@dataclass(frozen=True, slots=True)
class Damage:
    """Effect of a fault on users, from its begin to weight 0."""

    arrived: int
    """Requests that arrived, of all versions."""
    bad: int
    """Bad answers that ended after the fault began, also those after weight 0."""
    errors: int
    wrong: int
    silent: int
    bound: float
    """Most bad answers that are allowed: BOUND_FACTOR x weight x `arrived`."""

    @property
    def is_within(self) -> bool:
        """True if the bad answers are within their bound."""
        return self.bad <= self.bound


def damage(turns: Iterable[Turn], begun_s: float, acked_s: float, weight_percent: int) -> Damage:
    """Return the damage of a fault. `weight_percent`: largest weight of the canary from `begun_s` to `acked_s`."""
    told = list(turns)
    arrived = sum(begun_s <= turn.arrived_s <= acked_s for turn in told)
    bad = [turn for turn in told if turn.is_bad and turn.ended_s >= begun_s]
    return Damage(
        arrived=arrived,
        bad=len(bad),
        errors=sum(bool(turn.error) for turn in bad),
        wrong=sum(turn.is_wrong for turn in bad),
        silent=sum(turn.is_silent for turn in bad),
        bound=BOUND_FACTOR * weight_percent / 100 * arrived,
    )


def hang_began_s(turns: Iterable[Turn], begun_s: float) -> float | None:
    """Return the time at which the tenth request that hangs was open; None: fewer hung."""
    silent_from = sorted(turn.silent_from_s for turn in turns if turn.is_silent and turn.ended_s >= begun_s)
    return silent_from[HANG_OPEN - 1] if len(silent_from) >= HANG_OPEN else None


def within(turns: Iterable[Turn], windows: Sequence[tuple[float, float]]) -> list[Turn]:
    """Return the turns that arrived inside one of `windows`, each from a time to a time."""
    return [turn for turn in turns if any(low <= turn.arrived_s < high for low, high in windows)]


def ttft_p95_s(turns: Iterable[Turn]) -> float | None:
    """Return the 95th percentile of TTFT. A turn without a token counts with its silence. None: no turns."""
    values = [turn.silent_s if turn.ttft_s is None else turn.ttft_s for turn in turns]
    return quantile(values, 0.95) if values else None


def hit_ratio(turns: Iterable[Turn]) -> float | None:
    """Return the share of prompt tokens that came from a prefix cache, over turns that ended well. None: no turns."""
    told = [turn for turn in turns if not turn.error]
    prompt = sum(turn.prompt_tokens for turn in told)
    return sum(turn.cached_tokens for turn in told) / prompt if prompt else None
