"""A mesh for conversations: four prefill and four decode replicas whose prompts cost what an 8B model's do, two routers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import engines
from bench.conversation_player import Taken
from bench.conversations import BLOCK_TOKENS, COST, Plan
from bench.engines import EngineCosts
from bench.mesh import Mesh, names
from bench.processes import ANY_CORE, BenchError, Fleet, Process

PREFILLS = DECODES = 4
ROUTERS = 2
STEP_S = 0.02
PREFILL_BLOCKS = 1024
"""KV cache of a prefill replica: 64 GiB of the 8B model's at the recorded lengths."""

PLAY_TIMEOUT_S = 240.0
STILL_S_MAX = 2.0


@dataclass(slots=True)
class Conversations:
    """What is said with a system."""

    client: Process

    def open(self, plan: Plan, seed: int) -> None:
        """Begin conversations, and let the routers see what prompts cost."""
        self.client.ask("open", plan=plan.conversations, seed=seed)

        def is_warm() -> bool:
            return not self.client.ask("warm", seed=seed, timeout_s=PLAY_TIMEOUT_S)["failed"]

        self.client.wait_until(is_warm, "got no answer to some prompt")

    def play(self, until_s: float) -> list[Taken]:
        """Play on to `until_s` on the plan's clock. Raises BenchError if the machine stood still meanwhile."""
        answer = self.client.ask("play", until_s=until_s, timeout_s=PLAY_TIMEOUT_S)
        if answer["stood_still_s"] > STILL_S_MAX:
            raise BenchError(f"the client stood still for {answer['stood_still_s']:.1f} s")
        return [Taken(*one) for one in answer["taken"]]


@dataclass(slots=True)
class ConversationMesh(Conversations):
    """What runs."""

    running: Mesh
    prefills: Sequence[str]


def start(fleet: Fleet, prefill_blocks: int = PREFILL_BLOCKS) -> ConversationMesh:
    """Start everything, each prefill replica with a cache of `prefill_blocks`."""
    prefill = EngineCosts(0.0, COST.a_s, COST.c0_s, COST.b_s / 2, prefill_blocks)
    prefills = names("prefill", PREFILLS)
    costs = dict.fromkeys(prefills, prefill) | dict.fromkeys(names("decode", DECODES), EngineCosts(STEP_S))
    tables = {
        "engine": {**engines.CONFIG, "block_tokens": BLOCK_TOKENS, "prefill_kv_blocks": prefill_blocks},
        "router": {"local_prefill_tokens_max": 0},  # a decode engine's cache is not what is looked at
    }
    mesh = Mesh(fleet, costs, tables, ROUTERS)
    client = fleet.neighbour("client", "bench.conversation_client", ANY_CORE, target=mesh.frontend.address)
    return ConversationMesh(client, mesh, prefills)


def regret(routers: Sequence[Process]) -> dict[str, float]:
    """Return by how much first tokens came late and early against the estimates, over all routers, and their count."""
    names = {
        f"{when}_{what}": f"kvmesh_router_first_token_{when}_seconds_{what}"
        for when in ("late", "early")
        for what in ("sum", "count")
    }
    return {name: sum(router.metric(metric) for router in routers) for name, metric in names.items()}
