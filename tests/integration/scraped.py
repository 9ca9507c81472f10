"""Metrics of the processes of a whole mesh, scraped from the endpoint for Prometheus."""

from __future__ import annotations

import re

from tests.integration.harness import Mesh
from tests.integration.probes import metrics_address, probed


async def sample(mesh: Mesh, name: str, metric: str) -> float:
    """Return the sum of metric `metric` of process `name` over all labels. Raises AssertionError if there is none."""
    found = re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", await _scrape(mesh, name), re.MULTILINE)
    assert found, f"{name} exports no {metric}"
    return sum(float(value) for value in found)


async def settled(mesh: Mesh) -> dict[str, int]:
    """Return the settled tokens by kind, summed over the running frontends."""
    sums: dict[str, int] = {}
    for name in mesh.running("frontend"):
        for kind, value in re.findall(
            r'kvmesh_frontend_settled_tokens(?:_total)?\{kind="(\w+)"\} ([\d.e+]+)', await _scrape(mesh, name)
        ):
            sums[kind] = sums.get(kind, 0) + int(float(value))
    return sums


async def _scrape(mesh: Mesh, name: str) -> str:
    status, text = await probed(metrics_address(mesh.parts[name].log), "/metrics")
    assert status == 200, text
    return text
