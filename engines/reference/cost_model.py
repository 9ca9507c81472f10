"""The cost model: simulated durations of steps and KV transfers on an absolute schedule. Pure.

With these costs a CPU engine has the timing of a GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# Largest delay that a late engine makes up for. Without the bound a stall would be followed by a burst of steps.
LAG_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class CostModel:
    """Simulated durations in seconds. With all costs 0 the engine runs as fast as the machine.

    A prefill of n uncached tokens over positions [s, s+n) costs
    prefill_s + n * prefill_token_s + ((s+n)^2 - s^2) * prefill_token2_s.
    INVARIANT: the cost of a prefill does not depend on its split into chunks.
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
        """Return the seconds of one prefill chunk over positions [start, start + count)."""
        end = start + count
        return (
            (self.prefill_s if is_first else 0.0)
            + count * self.prefill_token_s
            + (end * end - start * start) * self.prefill_token2_s
        )

    def step_total_s(self, chunks_s: Iterable[float]) -> float:
        """Return the seconds of one step with these prefill chunks."""
        return self.step_s + sum(chunks_s)


@dataclass(slots=True)
class Pacer:
    """Paces work to an absolute schedule: each end is computed from the previous end, so late wake-ups do not drift."""

    _end_s: float = field(default=float("-inf"))

    def is_over(self, now_s: float) -> bool:
        """Return whether all booked work has ended at `now_s`."""
        return self._end_s <= now_s

    def book(self, now_s: float, cost_s: float, *, was_idle: bool) -> float:
        """Book `cost_s` of work and return the time at which that work ends (cost 0: now).

        `was_idle`: the work starts now. Otherwise it starts at the end of the previous work, so that a delay of up to
        LAG_MAX_S is made up for.
        """
        base_s = now_s if was_idle else max(self._end_s, now_s - LAG_MAX_S)
        self._end_s = base_s + cost_s
        if cost_s == 0.0:
            self._end_s = now_s
        return self._end_s
