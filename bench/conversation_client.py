"""A neighbour that holds conversations with the mesh over its own API. Run as `python -m bench.conversation_client`.

Steered over stdin: open {plan: [[[at_s, fresh tokens, output tokens], ...], ...], seed}; warm; play {until_s} answers
{taken: [...], stood_still_s}, rows of conversation_player.Taken.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from bench import control, generation
from bench.conversation_player import Asker, Player, Reply
from bench.conversations import Turn

DEADLINE_S = 120.0


class MeshAsker:
    """Implements Asker with token ids."""

    def __init__(self, stub: generation.Stub) -> None:
        self._stub = stub

    def fresh(self, count: int, draw: random.Random) -> list[int]:
        """See Asker."""
        return generation.random_ids(count, draw)

    def prompt(self, said: Sequence[Sequence[int]]) -> list[int]:
        """See Asker."""
        return [token for part in said for token in part]

    async def ask(self, said: Sequence[Sequence[int]], output_tokens: int) -> Reply[int]:
        """See Asker."""
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


async def serve(asker: Asker[Any]) -> None:
    """Serve until stdin ends."""
    player: Player[Any] | None = None

    async def open_(plan: list[list[list[Any]]], seed: int) -> None:
        nonlocal player
        player = Player(asker, [[Turn(*turn) for turn in turns] for turns in plan], seed)

    async def warm(seed: int) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        return {"failed": await player.warm(seed)}

    async def play(until_s: float) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        return {"taken": await player.play(until_s), "stood_still_s": player.watch.longest_s}

    await control.serve_commands(open_, warm, play)


async def serve_mesh(target: str) -> None:
    """Serve conversations with the mesh whose frontend is at `target`, host:port."""
    async with generation.channel(target) as stub:
        await serve(MeshAsker(stub))


if __name__ == "__main__":
    control.main(serve_mesh, __doc__)
