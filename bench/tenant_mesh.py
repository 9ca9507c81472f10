"""A mesh of processes with tenants, its engines' `hashed` arithmetic with costs, and a client that replays arrivals."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.arrivals import Arrival, Seen
from bench.engines import EngineCosts
from bench.mesh import Mesh, names
from bench.processes import ANY_CORE, Fleet, Process

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
    tables: dict[str, dict[str, Any]] = {"router": {"local_prefill_tokens_max": 0, **(router or {})}}
    for tenant, key in keys.items():
        tables[f"tenants.{tenant}"] = {}
        tables[f"keys.{tenant}"] = {"tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    costs = dict.fromkeys(names("prefill", prefills), EngineCosts(0.0, prefill_token_s=TOKEN_S))
    costs |= dict.fromkeys(names("decode", decodes), EngineCosts(STEP_S, prefill_token_s=TOKEN_S))
    running = Mesh(fleet, costs, tables)
    client = fleet.neighbour("client", "bench.arrivals", ANY_CORE, target=running.frontend.address)
    made = TenantMesh(running.frontend, list(running.replicas.values())[:prefills], client, keys)
    trial = Arrival(0.0, next(iter(keys)), 64, 1, 10.0)
    running.frontend.wait_until(lambda: not made.replay([trial])[0].reason, "answered no request")
    return made


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
