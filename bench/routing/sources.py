"""The traces of the comparison of placement, read from bench/traces."""

from __future__ import annotations

from typing import Final

from bench.routing.rows import LARGE_REQUESTS, TRACES
from kvmesh.config import ROOT
from simulator.trace import Trace, read

FOLDER: Final = ROOT / "bench" / "traces"


def traces() -> dict[str, Trace]:
    """Return each trace by name, and its first LARGE_REQUESTS requests as NAME-head."""
    found = {}
    for name, file in TRACES.items():
        found[name] = read(FOLDER / f"{file}.jsonl.gz")
        found[f"{name}-head"] = found[name].head(LARGE_REQUESTS)
    return found
