"""What a step or a transfer should cost, on an absolute schedule, so that a CPU engine shows a GPU's rates.
Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# A late engine catches up at most this much, else one stall would be followed by a burst.
LAG_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds things take. All zero: as fast as the machine goes.

    A prefill of n uncached tokens over positions [s, s+n) costs
    prefill_s + n * prefill_token_s + ((s+n)^2 - s^2) * prefill_token2_s, however it is chunked.
    """

    step_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_token2_s: float = 0.0
    block_transfer_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_s", "prefill_s", "prefill_token_s", "prefill_token2_s", "block_transfer_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def chunk_s(self, start: int, count: int, *, is_first: bool) -> float:
        """Seconds of one prefill chunk over positions [start, start + count)."""
        end = start + count
        return (
            (self.prefill_s if is_first else 0.0)
            + count * self.prefill_token_s
            + (end * end - start * start) * self.prefill_token2_s
        )

    def step_total_s(self, chunks_s: Iterable[float]) -> float:
        """Seconds of one step with these prefill chunks."""
        return self.step_s + sum(chunks_s)


@dataclass(slots=True)
class Pacer:
    """When the next piece of work is over: ends add up from each other, not from when somebody looked."""

    _end_s: float = field(default=float("-inf"))

    def is_over(self, now_s: float) -> bool:
        """Whether everything booked has ended."""
        return self._end_s <= now_s

    def book(self, now_s: float, cost_s: float, *, was_idle: bool) -> float:
        """Book `cost_s` of work and return when it ends (0 cost: now). Idle time is never made up for."""
        base_s = now_s if was_idle else max(self._end_s, now_s - LAG_MAX_S)
        self._end_s = base_s + cost_s
        if cost_s == 0.0:
            self._end_s = now_s
        return self._end_s
