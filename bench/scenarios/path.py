"""To come."""

from __future__ import annotations

from bench.results import Results
from bench.windows import Pace

NAME = "path"


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
