"""A mesh with tenants, and its client, which replays given arrivals.

The client is an open loop: a slow mesh does not slow the arrivals. It is this module as a process, with one command: replay
{arrivals: [rows of Arrival], keys: {tenant: bearer}}. It returns {seen: [rows of Answered]}, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench import control, generation
from bench.engines import EngineCosts
from bench.mesh import Mesh, names
from bench.processes import ANY_CORE, Fleet, Process

TOKEN_S = 0.0005
"""Prefill time of a prompt token: 200 tokens take 0.1 s."""

STEP_S = 0.01
DEADLINE_S = 120.0


class Arrival(NamedTuple):
    """One request, `at_s` seconds after the start."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    deadline_s: float


class Answered(NamedTuple):
    """The outcome of one request."""

    tenant: str
    ttft_ms: float | None
    reason: str
    """Reason of the error; empty: the request succeeded."""
    retry_after_s: float | None
    tokens: int
    ended_s: float
    """After the start."""


@dataclass(frozen=True, slots=True)
class TenantMesh:
    """A running mesh with tenants."""

    frontend: Process
    prefills: Sequence[Process]
    client: Process
    keys: Mapping[str, str]

    def replay(self, arrivals: Sequence[Arrival]) -> list[Answered]:
        """Send `arrivals` as open-loop load, each at its time, and return their outcomes."""
        longest_s = max(one.at_s + one.deadline_s for one in arrivals)
        answer = self.client.ask("replay", arrivals=arrivals, keys=self.keys, timeout_s=longest_s + 60.0)
        return [Answered(*one) for one in answer["seen"]]

    def learn(self) -> None:
        """Let the router learn the cost of prompts from single requests of several lengths."""
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
    """Start all and return when a request was answered."""
    keys = {tenant: f"kvm_{tenant.replace('-', '_')}{'0' * 40}" for tenant in tenants}
    tables: dict[str, dict[str, Any]] = {"router": {"local_prefill_tokens_max": 0, **(router or {})}}
    for tenant, key in keys.items():
        tables[f"tenants.{tenant}"] = {}
        tables[f"keys.{tenant}"] = {"tenant": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    costs = dict.fromkeys(names("prefill", prefills), EngineCosts(0.0, prefill_token_s=TOKEN_S))
    costs |= dict.fromkeys(names("decode", decodes), EngineCosts(STEP_S, prefill_token_s=TOKEN_S))
    running = Mesh(fleet, costs, tables)
    client = fleet.start_ready("client", __name__, ANY_CORE, target=running.frontend.address)
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
    """Return the requests of a Poisson process: `per_s` on average, for `seconds`."""
    arrivals, at_s = [], 0.0
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        arrivals.append(Arrival(at_s, tenant, tokens, output, deadline_s))
    return arrivals


async def replay(
    stub: generation.Stub, arrivals: Sequence[Arrival], keys: Mapping[str, str], draw: random.Random
) -> list[Answered]:
    """Send every request at its time, whatever is unanswered (open loop); return when all have ended."""
    start_s = time.monotonic()

    async def send(arrival: Arrival) -> Answered:
        ids = generation.random_ids(arrival.prompt_tokens, draw)
        request = generation.request(ids, arrival.output_tokens)
        answer = await generation.ask(stub, request, arrival.deadline_s, keys.get(arrival.tenant, ""))
        ttft_ms = None if answer.ttft_s is None else answer.ttft_s * 1000
        ended_s = time.monotonic() - start_s
        return Answered(arrival.tenant, ttft_ms, answer.error, answer.retry_after_s, len(answer.ids), ended_s)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
            tasks.append(group.create_task(send(arrival)))
    return [task.result() for task in tasks]


async def serve(target: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: host:port of the frontend."""
    draw = random.Random(seed)
    async with generation.channel(target) as stub:

        async def replay_(arrivals: list[list[Any]], keys: Mapping[str, str]) -> Mapping[str, Any]:
            return {"seen": await replay(stub, [Arrival(*one) for one in arrivals], keys, draw)}

        await control.serve_commands(replay_)


if __name__ == "__main__":
    control.main(serve, __doc__)
