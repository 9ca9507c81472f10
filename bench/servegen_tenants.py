"""Arrivals of a real service with many tenants: rates, burstiness and lengths of an excerpt of ServeGen's clients.

The excerpt is servegen_tenants.jsonl; servegen_tenants.md states its origin and licence. It has those 15 of the 40 busiest
clients that have known lengths. Each has the rate and the coefficient of variation of one ten-minute window.
"""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from bench.tenant_mesh import Arrival

EXCERPT: Final = Path(__file__).with_suffix(".jsonl")
BURST_MAX: Final = 150
"""Most requests of one tenant in a run. With gaps that vary by a factor of 100, a client may send thousands at once."""


class Client(NamedTuple):
    """One client of the excerpt."""

    tenant: str
    per_s: float
    variation: float
    """Standard deviation of the gaps, in mean gaps."""
    prompt: list[int]
    """Tokens: 10th, 50th, 90th and 99th percentile."""


def clients() -> list[Client]:
    """Read the excerpt, the burstiest client first."""
    rows = [json.loads(line) for line in EXCERPT.read_text(encoding="utf-8").splitlines()]
    found = [Client(row["tenant"], row["rate"], row["cv"], row["input_tokens_p10_50_90_99"]) for row in rows]
    return sorted(found, key=lambda one: -one.variation)


def arrivals(
    client: Client, factor: float, seconds: float, draw: random.Random, deadline_s: float
) -> list[Arrival]:
    """Return requests of one client at `factor` of its rate: Weibull gaps of its variation, prompts of its lengths."""
    shape = _weibull_shape(client.variation)
    scale = 1 / (client.per_s * factor * math.gamma(1 + 1 / shape))
    found: list[Arrival] = []
    at_s = draw.uniform(0.0, min(seconds / 4, 1 / (client.per_s * factor)))
    while at_s < seconds and len(found) < BURST_MAX:
        found.append(Arrival(at_s, client.tenant, _length(client.prompt, draw), 1, deadline_s))
        at_s += draw.weibullvariate(scale, shape)
    return found


def _length(quantiles: list[int], draw: random.Random) -> int:
    """Draw a length: linear between the known percentiles."""
    points = list(zip((0.0, 0.1, 0.5, 0.9, 0.99), (quantiles[0], *quantiles), strict=True))
    at = min(draw.random(), 0.99)
    for (low, shorter), (high, longer) in pairwise(points):
        if at <= high:
            return round(shorter + (longer - shorter) * (at - low) / (high - low))
    raise AssertionError(at)


def _weibull_shape(variation: float) -> float:
    """Return the shape of the Weibull distribution with this coefficient of variation, by bisection."""
    low, high = 0.1, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        log_ratio = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        if math.sqrt(max(0.0, math.expm1(log_ratio))) > variation:
            low = middle
        else:
            high = middle
    return high
