"""Cold shapes: steps that take longer in their first runs after boot. Pure.

Models kernels and graphs that a GPU engine builds, tunes or captures per shape after each boot. The batch of a step is
padded to a power of two, so all steps of one power of two share kernels and graphs.

A step has up to two shapes: ("prefill", the power of two at or above its prompt rows) and ("decode", the power of two at
or above its decode rows). A shape is cold in its first `cold_runs` runs. A step with a cold shape takes `cold_s` longer.
"""

from dataclasses import dataclass, field
from typing import Literal

Shape = tuple[Literal["prefill", "decode"], int]


def shapes_of(prefill_tokens: int, decode_rows: int) -> tuple[Shape, ...]:
    """Return the shapes of a step with so many prompt rows and decode rows; no shape for 0 rows."""
    shapes: list[Shape] = []
    if prefill_tokens > 0:
        shapes.append(("prefill", _power_of_two(prefill_tokens)))
    if decode_rows > 0:
        shapes.append(("decode", _power_of_two(decode_rows)))
    return tuple(shapes)


@dataclass(slots=True)
class ColdShapes:
    """Counts the runs of each shape since boot. With `cold_s` 0 no shape is ever cold.

    INVARIANT: a step pays `cold_s` at most once, even if both its shapes are cold.
    """

    cold_s: float = 0.0
    cold_runs: int = 2
    steps_total: int = 0  # steps that paid `cold_s`
    _runs: dict[Shape, int] = field(default_factory=dict)

    def extra_s(self, shapes: tuple[Shape, ...]) -> float:
        """Return the seconds by which a step with these shapes is longer now. Counts nothing."""
        is_cold = any(self._runs.get(shape, 0) < self.cold_runs for shape in shapes)
        return self.cold_s if is_cold else 0.0

    def record(self, shapes: tuple[Shape, ...]) -> None:
        """Count a run of each shape, and the step if it was cold."""
        self.steps_total += self.extra_s(shapes) > 0.0
        for shape in shapes:
            self._runs[shape] = self._runs.get(shape, 0) + 1


def _power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
