"""A mesh of processes with tenants, its engines' `hashed` arithmetic with costs, and a client that replays arrivals."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import engines
from bench.arrivals import Arrival, Seen
from bench.engines import EngineCosts
from bench.processes import ANY_CORE, BenchError, Fleet, Process

SERVE_TIMEOUT_S = 30.0
TOKEN_S = 0.0005
"""What a prompt token costs: 200 tokens take 0.1 s."""

STEP_S = 0.01
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class TenantMesh:
    """What runs."""

    frontend: Process
    prefills: Sequence[Process]
    client: Process
    keys: Mapping[str, str]

    def replay(self, arrivals: Sequence[Arrival]) -> list[Seen]:
        """Send `arrivals` and return what became of them."""
        longest_s = max(one.at_s + one.deadline_s for one in arrivals)
        answer = self.client.ask("replay", arrivals=arrivals, keys=self.keys, timeout_s=longest_s + 60.0)
        return [Seen(*one) for one in answer["seen"]]

    def learn(self) -> None:
        """Let the router see what prompts cost: lone requests of several lengths."""
        tenant = next(iter(self.keys))
        lengths = [100 + 150 * (number % 14) for number in range(28)]
        self.replay([Arrival(0.7 * at, tenant, tokens, 1, DEADLINE_S) for at, tokens in enumerate(lengths)])


def start(
    fleet: Fleet,
    tenants: Iterable[str],
    *,
    prefills: int,
    decodes: int = 1,
    router: Mapping[str, Any] | None = None,
) -> TenantMesh:
    """Start everything and wait until a request was answered."""
    keys = {tenant: f"kvm_{tenant.replace('-', '_')}{'0' * 40}" for tenant in tenants}
    tables: dict[str, dict[str, Any]] = {
        "engine": {"arithmetic": "hashed", "max_sequence_tokens": 8192, "kv_blocks": 60_000},
        "telemetry": {"log_level": "warning"},
        "router": {"local_prefill_tokens_max": 0, **(router or {})},
    }
    for tenant, key in keys.items():
        tables[f"tenants.{tenant}"] = {}
        tables[f"keys.{tenant}"] = {"tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    redis_url, config = fleet.redis(), fleet.config(tables)
    names = [("prefill", number) for number in range(prefills)] + [
        ("decode", number) for number in range(decodes)
    ]
    started = {}
    for role, number in names:
        costs = EngineCosts(STEP_S if role == "decode" else 0.0, prefill_token_s=TOKEN_S)
        started[role, number] = engines.start(fleet, f"{role}-engine-{number}", costs, ANY_CORE)
    fleet.service("router", "router-0", config, redis_url, core=ANY_CORE)
    replicas = []
    for role, number in names:
        engine = started[role, number]
        engines.wait_ready(engine)
        options = ("--engine", engine.address)
        replicas.append(fleet.service(role, f"{role}-{number}", config, redis_url, *options, core=ANY_CORE))
    front = fleet.service("frontend", "frontend-0", config, redis_url, core=ANY_CORE)
    client = fleet.neighbour("client", "bench.arrivals", "--target", front.address, core=ANY_CORE)
    mesh = TenantMesh(front, replicas[:prefills], client, keys)
    _wait_served(mesh)
    return mesh


def poisson(
    draw: random.Random,
    tenant: str,
    per_s: float,
    tokens: int,
    seconds: float,
    *,
    output: int = 1,
    deadline_s: float = DEADLINE_S,
) -> list[Arrival]:
    """Return requests at random moments."""
    arrivals, at_s = [], 0.0
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        arrivals.append(Arrival(at_s, tenant, tokens, output, deadline_s))
    return arrivals


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed. Raises BenchError without values."""
    ordered = sorted(values)
    if not ordered:
        raise BenchError("no request had a first token")
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


def _wait_served(mesh: TenantMesh) -> None:
    end_s = time.monotonic() + SERVE_TIMEOUT_S
    tenant = next(iter(mesh.keys))
    while time.monotonic() < end_s:
        if not mesh.replay([Arrival(0.0, tenant, 64, 1, 10.0)])[0].reason:
            return
        time.sleep(0.2)
    raise BenchError(f"no request was answered within {SERVE_TIMEOUT_S:g} s: {mesh.frontend.log_tail()}")
