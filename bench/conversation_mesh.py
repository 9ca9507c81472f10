"""A mesh for conversations, and its client: two routers, four prefill and four decode replicas, prefill costs of 8B.

The client is this module as a process. Its commands: open {plan: [[[at_s, fresh tokens, output tokens], ...], ...], seed};
warm {seed}; play {until_s}. play returns {taken: [...], stalled_s}; `taken` has rows of conversation_player.PlayedTurn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import control, engines, generation
from bench.conversation_player import Backend, PlayedTurn, Player, Reply
from bench.conversations import BLOCK_TOKENS, COST, Plan, Turn
from bench.engines import EngineCosts
from bench.mesh import Mesh, names
from bench.processes import ANY_CORE, Fleet, Process
from bench.results import BenchError

PREFILLS = DECODES = 4
ROUTERS = 2
STEP_S = 0.02
PREFILL_BLOCKS = 1024
"""KV cache of a prefill replica. At the recorded lengths, an 8B model takes 64 GiB for these blocks."""

PLAY_TIMEOUT_S = 240.0
DEADLINE_S = 120.0
STALL_S_MAX = 2.0


@dataclass(slots=True)
class Conversations:
    """Conversations with a system, through a client process."""

    client: Process

    def open(self, plan: Plan, seed: int) -> None:
        """Begin conversations, and let the routers learn the cost of prompts."""
        self.client.ask("open", plan=plan.conversations, seed=seed)

        def is_warm() -> bool:
            return not self.client.ask("warm", seed=seed, timeout_s=PLAY_TIMEOUT_S)["failed"]

        self.client.wait_until(is_warm, "got no answer to some prompt")

    def play(self, until_s: float) -> list[PlayedTurn]:
        """Play to `until_s` on the plan's clock. Raises BenchError if the client's event loop stalled."""
        answer = self.client.ask("play", until_s=until_s, timeout_s=PLAY_TIMEOUT_S)
        if answer["stalled_s"] > STALL_S_MAX:
            raise BenchError(
                f"event loop of the client stalled for {answer['stalled_s']:.1f} s, at most {STALL_S_MAX:g} s allowed"
            )
        return [PlayedTurn(*one) for one in answer["taken"]]


@dataclass(slots=True)
class ConversationMesh(Conversations):
    """Conversations with kvmesh."""

    running: Mesh
    prefills: Sequence[str]


def start(fleet: Fleet, prefill_blocks: int = PREFILL_BLOCKS) -> ConversationMesh:
    """Start everything, each prefill replica with a cache of `prefill_blocks`."""
    prefill = EngineCosts(0.0, COST.a_s, COST.c0_s, COST.b_s / 2, prefill_blocks)
    prefills = names("prefill", PREFILLS)
    costs = dict.fromkeys(prefills, prefill) | dict.fromkeys(names("decode", DECODES), EngineCosts(STEP_S))
    tables = {
        "engine": {**engines.CONFIG, "block_tokens": BLOCK_TOKENS, "prefill_kv_blocks": prefill_blocks},
        "router": {"local_prefill_tokens_max": 0},  # all prompts go to prefill: its caches are measured
    }
    mesh = Mesh(fleet, costs, tables, ROUTERS)
    client = fleet.start_ready("client", __name__, ANY_CORE, target=mesh.frontend.address)
    return ConversationMesh(client, mesh, prefills)


def regret(routers: Sequence[Process]) -> dict[str, float]:
    """Return the lateness and earliness of first tokens against the estimates: sum and count over all routers."""
    names = {
        f"{when}_{what}": f"kvmesh_router_first_token_{when}_seconds_{what}"
        for when in ("late", "early")
        for what in ("sum", "count")
    }
    return {name: sum(router.metric(metric) for router in routers) for name, metric in names.items()}


class MeshBackend:
    """Implements Backend with token ids."""

    def __init__(self, stub: generation.Stub) -> None:
        self._stub = stub

    def fresh(self, count: int, draw: random.Random) -> list[int]:
        """See Backend."""
        return generation.random_ids(count, draw)

    def prompt(self, said: Sequence[Sequence[int]]) -> list[int]:
        """See Backend."""
        return [token for part in said for token in part]

    async def ask(self, said: Sequence[Sequence[int]], output_tokens: int) -> Reply[int]:
        """See Backend."""
        request = generation.request(self.prompt(said), output_tokens, explain=True)
        answer = await generation.ask(self._stub, request, DEADLINE_S)
        if answer.finished is None:
            return Reply(answer.ids, answer.ttft_s, answer.error or "ended without finished")
        first = answer.finished.explanation.attempts[0]
        cached, replica = (
            answer.finished.usage.cached_token_count,
            first.prefill_replica or first.decode_replica,
        )
        prefill_s = first.prefill.ToNanoseconds() / 1e9
        return Reply(answer.ids, answer.ttft_s, answer.error, cached, replica, prefill_s)


async def serve(backend: Backend[Any]) -> None:
    """Serve until stdin ends."""
    player: Player[Any] | None = None

    async def open_(plan: list[list[list[Any]]], seed: int) -> None:
        nonlocal player
        player = Player(backend, [[Turn(*turn) for turn in turns] for turns in plan], seed)

    async def warm(seed: int) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        return {"failed": await player.warm(seed)}

    async def play(until_s: float) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        return {"taken": await player.play(until_s), "stalled_s": player.watch.longest_s}

    await control.serve_commands(open_, warm, play)


async def serve_mesh(target: str) -> None:
    """Serve conversations with a mesh. `target`: host:port of its frontend."""
    async with generation.channel(target) as stub:
        await serve(MeshBackend(stub))


if __name__ == "__main__":
    control.main(serve_mesh, __doc__)
