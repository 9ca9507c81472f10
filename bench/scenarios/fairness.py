"""Effect of a tenant's burst on others: time to first token with and without the burst, and Jain's fairness index.

Four prefill replicas take 0.5 ms per prompt token. In the case of a burst, tenant b sends a prompt of 200 tokens twice
a second, and tenant a sends 25 prompts of 2,000 tokens at once, every 12 s. In the case of ServeGen, fifteen clients of
a real service run at FACTOR of their rates. The burstiest client is a, the others are b.
"""

from __future__ import annotations

import random
from collections import Counter

from bench import aims, servegen_tenants, tenant_mesh
from bench.processes import Fleet
from bench.results import ScenarioResults, quantile
from bench.tenant_mesh import DEADLINE_S, Answered, Arrival, TenantMesh, poisson
from bench.windows import Pace

PREFILLS = 4
SHORT, LONG = 200, 2000
BURST, BURST_EVERY_S = 25, 12.0
SECONDS, QUICK_SECONDS = 60.0, 36.0
FACTOR = 0.01
"""Share of the rates of ServeGen's clients, as in aims.SERVEGEN.

At these rates all clients but the burstiest use 44 % of the prefill replicas' time (measured once, by hand).
"""

BACKLOG_S = 15.0


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    seconds = QUICK_SECONDS if pace.is_quick else SECONDS
    draw = random.Random(1)
    clients = servegen_tenants.clients()
    with Fleet() as fleet:
        tenants = ["a", "b", "c", *(client.tenant for client in clients)]
        mesh = tenant_mesh.start(fleet, tenants, prefills=PREFILLS)
        mesh.learn()
        quiet = poisson(draw, "b", 2.0, SHORT, seconds)
        burst = [
            Arrival(3.0 + number * BURST_EVERY_S + 0.001 * index, "a", LONG, 1, DEADLINE_S)
            for number in range(int((seconds - 3.0) / BURST_EVERY_S))
            for index in range(BURST)
        ]
        _compare(results, mesh, aims.BURST, quiet, burst)

        def arrivals(client: servegen_tenants.Client) -> list[Arrival]:
            return servegen_tenants.arrivals(client, FACTOR, seconds, draw, DEADLINE_S)

        bursty, *others = clients
        quiet = [one for client in others for one in arrivals(client)]
        burst = arrivals(bursty)
        _compare(results, mesh, aims.SERVEGEN, quiet, burst)
        _measure_index(results, mesh)


def _compare(
    results: ScenarioResults, mesh: TenantMesh, case: str, quiet: list[Arrival], burst: list[Arrival]
) -> None:
    """Send the quiet requests without the burst, then with it."""
    bursting = {one.tenant for one in burst}
    p95 = []
    for arrivals, way in ((quiet, "without the burst"), ([*quiet, *burst], "with the burst")):
        seen = mesh.replay(sorted(arrivals, key=lambda one: one.at_s))
        others = [one for one in seen if one.tenant not in bursting]
        _check(results, case, others)
        found = [one.ttft_ms for one in others if one.ttft_ms is not None]
        for share in (0.5, 0.95):
            value = quantile(found, share)
            results.add(case, f"time to first token of others, p{share * 100:.0f}, {way}", "ms", value)
        p95.append(quantile(found, 0.95))
    results.add(case, aims.FELT, "x", p95[1] / p95[0])


def _measure_index(results: ScenarioResults, mesh: TenantMesh) -> None:
    """Keep a backlog of three tenants, with prompts of 200, 1,000 and 2,000 tokens, for BACKLOG_S.

    Add Jain's index of the prompt tokens that each tenant was served in this time.
    """
    lengths = {"a": LONG, "b": SHORT, "c": 1000}
    tokens_each = round(PREFILLS * BACKLOG_S / tenant_mesh.TOKEN_S)
    arrivals = [
        Arrival(0.0005 * index, tenant, length, 1, DEADLINE_S)
        for tenant, length in lengths.items()
        for index in range(tokens_each // 2 // length)
    ]
    served: Counter[str] = Counter()
    for one in mesh.replay(sorted(arrivals, key=lambda one: one.at_s)):
        if one.ttft_ms is not None and one.ttft_ms <= BACKLOG_S * 1000:
            served[one.tenant] += lengths[one.tenant]
    values = [served[tenant] for tenant in lengths]
    index = sum(values) ** 2 / (len(values) * sum(value * value for value in values))
    results.add("three tenants with a constant backlog", "Jain's index of prompt tokens", "", index)


def _check(results: ScenarioResults, case: str, seen: list[Answered]) -> None:
    failed = Counter(one.reason for one in seen if one.reason)
    if failed:
        results.problem(f"of {len(seen)} requests {dict(failed)}", case)
