"""A mesh for conversations: four prefill and four decode replicas whose prompts cost what an 8B model's do, two routers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import engines
from bench.conversation_player import Taken
from bench.conversations import BLOCK_TOKENS, COST, Plan
from bench.engines import EngineCosts
from bench.processes import ANY_CORE, BenchError, Fleet, Process

PREFILLS = DECODES = 4
ROUTERS = 2
STEP_S = 0.02
PREFILL_BLOCKS = 1024
"""KV cache of a prefill replica: 64 GiB of the 8B model's at the recorded lengths."""

SERVE_TIMEOUT_S = 60.0
PLAY_TIMEOUT_S = 240.0
STILL_S_MAX = 2.0


@dataclass(slots=True)
class Conversations:
    """What is said with a system."""

    client: Process

    def open(self, plan: Plan, seed: int) -> None:
        """Begin conversations, and let the routers see what prompts cost."""
        self.client.ask("open", plan=plan.conversations, seed=seed)
        end_s = time.monotonic() + SERVE_TIMEOUT_S
        while self.client.ask("warm", seed=seed, timeout_s=PLAY_TIMEOUT_S)["failed"]:
            if time.monotonic() > end_s:
                raise BenchError(f"not every prompt was answered within {SERVE_TIMEOUT_S:g} s")

    def play(self, until_s: float) -> list[Taken]:
        """Play on to `until_s` on the plan's clock. Raises BenchError if the machine stood still meanwhile."""
        answer = self.client.ask("play", until_s=until_s, timeout_s=PLAY_TIMEOUT_S)
        if answer["stood_still_s"] > STILL_S_MAX:
            raise BenchError(f"the client stood still for {answer['stood_still_s']:.1f} s")
        return [Taken(*one) for one in answer["taken"]]


@dataclass(slots=True)
class ConversationMesh(Conversations):
    """What runs."""

    routers: list[Process]
    start_router: Callable[[int], Process]

    @property
    def replicas(self) -> list[str]:
        """Return the names of the prefill replicas."""
        return [f"prefill-{number}" for number in range(PREFILLS)]

    def restart_routers(self) -> None:
        """Kill every router without a warning, then start all again and return when they are ready."""
        for kill in [router.aim() for router in self.routers]:
            kill()
        self.routers = [self.start_router(number) for number in range(ROUTERS)]


@dataclass(frozen=True, slots=True)
class Regret:
    """First tokens against what the router estimated at the release."""

    late_s: float
    early_s: float
    count: int

    def __add__(self, other: Regret) -> Regret:
        return Regret(self.late_s + other.late_s, self.early_s + other.early_s, self.count + other.count)

    def __sub__(self, other: Regret) -> Regret:
        return Regret(self.late_s - other.late_s, self.early_s - other.early_s, self.count - other.count)


def start(fleet: Fleet, prefill_blocks: int = PREFILL_BLOCKS) -> ConversationMesh:
    """Start everything, each prefill replica with a cache of `prefill_blocks`."""
    prefill = EngineCosts(0.0, COST.a_s, COST.c0_s, COST.b_s / 2, prefill_blocks)
    roles = (("prefill", PREFILLS, prefill), ("decode", DECODES, EngineCosts(STEP_S)))
    config = fleet.config(
        {
            "engine": {
                "arithmetic": "hashed",
                "block_tokens": BLOCK_TOKENS,
                "max_sequence_tokens": 8192,
                "kv_blocks": 60_000,
                "prefill_kv_blocks": prefill_blocks,
            },
            "telemetry": {"log_level": "warning"},
            "router": {"local_prefill_tokens_max": 0},  # a decode engine's cache is not what is looked at
        }
    )
    redis_url = fleet.redis()
    started = {
        (role, number): engines.start(fleet, f"{role}-engine-{number}", costs, ANY_CORE)
        for role, count, costs in roles
        for number in range(count)
    }

    def start_router(number: int) -> Process:
        return fleet.service("router", f"router-{number}", config, redis_url, core=ANY_CORE)

    routers = [start_router(number) for number in range(ROUTERS)]
    for (role, number), engine in started.items():
        engines.wait_ready(engine)
        options = ("--engine", engine.address)
        fleet.service(role, f"{role}-{number}", config, redis_url, *options, core=ANY_CORE)
    front = fleet.service("frontend", "frontend-0", config, redis_url, core=ANY_CORE)
    client = fleet.neighbour("client", "bench.conversation_client", "--target", front.address, core=ANY_CORE)
    return ConversationMesh(client, routers, start_router)


def regret(routers: Sequence[Process]) -> Regret:
    """Return what the routers say by now."""
    total = Regret(0.0, 0.0, 0)
    for router in routers:
        late_s, late = _histogram(router, "first_token_late_seconds")
        early_s, early = _histogram(router, "first_token_early_seconds")
        total += Regret(late_s, early_s, round(late + early))
    return total


def _histogram(router: Process, name: str) -> tuple[float, float]:
    return router.metric(f"kvmesh_router_{name}_sum"), router.metric(f"kvmesh_router_{name}_count")
