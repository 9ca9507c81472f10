"""Published timings as recordings: timings of operators are added up here.

published/README.md states sources and licences.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Final

from bench.gpu.recording import Prefill, Recording, Step
from bench.gpu.shape import LLAMA_8B

FOLDER: Final = Path(__file__).parent / "published"
GATE_UP: Final = (12_288, 16_384)
"""Columns that add up to the 28,672 of gate and up, which were not timed as one product."""
DOWN: Final = (12_288, 16_384)
"""Inner widths around the 14,336 of the last product of a layer, which is their middle."""
LOGITS: Final = 65_536
"""Timed columns; twice that number is a vocabulary of 131,072."""


def operators() -> list[Recording]:
    """Return an 8B Llama on an H100, added up from its operators, one recording per software.

    The sum contains products and attention of all layers, and the logits of one token. It lacks norms, rotation, activation
    and the time between kernels: an engine takes longer.
    """
    times: dict[str, dict[tuple[str, int, int, int], float]] = {}
    for row in _rows("h100_operators.csv"):
        key = (row["operator"], int(row["m"]), int(row["n"]), int(row["k"]))
        times.setdefault(row["software"], {})[key] = float(row["milliseconds"]) / 1e3
    return [_added_up(software, Operators(found)) for software, found in times.items()]


def whole_prefills() -> tuple[Prefill, ...]:
    """Return prefills of a 70B Llama on two H100, timed as a whole."""
    seconds: dict[int, list[float]] = {}
    for row in _rows("h100_prefills.csv"):
        seconds.setdefault(int(row["uncached"]), []).append(float(row["milliseconds"]) / 1e3)
    return tuple(Prefill(0, tokens, tuple(found)) for tokens, found in seconds.items())


def prefix_attention() -> tuple[Prefill, ...]:
    """Return the attention of one layer of an 8B Llama on an A100, after cached tokens."""
    return tuple(
        Prefill(int(row["cached"]), int(row["uncached"]), (float(row["milliseconds"]) / 1e3,))
        for row in _rows("a100_prefix_attention.csv")
    )


@dataclass(frozen=True, slots=True)
class Operators:
    """Seconds by operator and its three sizes."""

    times: dict[tuple[str, int, int, int], float]

    def sizes(self) -> list[int]:
        """Return the rows for which all products of a layer were timed."""
        width = LLAMA_8B.width
        return sorted(m for kind, m, n, k in self.times if kind == "product" and n == k == width)

    def matrices_s(self, rows: int) -> float:
        """Return the time of the products of all layers for `rows` tokens."""
        width = LLAMA_8B.width
        shapes = [(width + 2 * LLAMA_8B.kv_width, width), (width, width), *((n, width) for n in GATE_UP)]
        layer = sum(self.times["product", rows, n, k] for n, k in shapes)
        layer += sum(self.times["product", rows, width, k] for k in DOWN) / len(DOWN)
        return LLAMA_8B.layers * layer

    def logits_s(self, rows: int) -> float:
        """Return the time of the product with the vocabulary."""
        return 2 * self.times["product", rows, LOGITS, LLAMA_8B.width]

    def attention_s(self, tokens: int) -> float:
        """Return the attention time of a whole prompt in all layers, log-linear between timed sizes."""
        timed = sorted(
            (m * n, seconds) for (kind, m, n, _), seconds in self.times.items() if kind == "prefill attention"
        )
        below = max(pair for pair in timed if pair[0] <= tokens)
        above = min(pair for pair in timed if pair[0] >= tokens)
        share = 0.0 if above == below else log(tokens / below[0]) / log(above[0] / below[0])
        return LLAMA_8B.layers * exp(log(below[1]) * (1 - share) + log(above[1]) * share)

    def steps(self) -> list[Step]:
        """Return decode steps, by streams and context."""
        return [
            Step(m, k, (self.matrices_s(m) + self.logits_s(m) + LLAMA_8B.layers * seconds,))
            for (kind, m, _, k), seconds in self.times.items()
            if kind == "decode attention"
        ]


def _added_up(software: str, operators: Operators) -> Recording:
    prefills = []
    for tokens in operators.sizes():
        seconds = operators.matrices_s(tokens) + operators.attention_s(tokens) + operators.logits_s(1)
        prefills.append(Prefill(0, tokens, (seconds,)))
    about = {"gpu": "NVIDIA H100 80GB HBM3", "software": software}
    return Recording(software, about, tuple(prefills), steps=tuple(operators.steps()))


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
