"""A neighbour that holds conversations with the mesh over its own API. Run as `python -m bench.conversation_client`.

Steered over stdin: open {plan: [[[at_s, fresh tokens, output tokens], ...], ...], seed}; warm; play {until_s} answers
{taken: [...], stood_still_s}, rows of conversation_player.Taken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import uvloop

from bench import control, prompts
from bench.conversation_player import Asker, Player, Reply
from bench.conversations import Turn
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

DEADLINE_S = 120.0


class MeshAsker:
    """Implements Asker with token ids."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
        self._stub = stub

    def fresh(self, count: int, draw: random.Random) -> list[int]:
        """See Asker."""
        return prompts.random_ids(count, draw)

    def prompt(self, said: Sequence[Sequence[int]]) -> list[int]:
        """See Asker."""
        return [token for part in said for token in part]

    async def ask(self, said: Sequence[Sequence[int]], output_tokens: int) -> Reply[int]:
        """See Asker."""
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(ids=self.prompt(said)),
            sampling=pb.Sampling(temperature=0.0),
            limits=pb.Limits(max_output_tokens=output_tokens),
        )
        request.options.explain = True
        now = asyncio.get_running_loop().time
        sent_s, reply = now(), Reply[int](error="ended without finished")
        try:
            async for message in self._stub.Generate(request, timeout=DEADLINE_S):
                if message.HasField("tokens") and message.tokens.ids:
                    if reply.ttft_s is None:
                        reply.ttft_s = now() - sent_s
                    reply.tokens += message.tokens.ids
                elif message.HasField("finished"):
                    reply.error = ""
                    reply.cached_tokens = message.finished.usage.cached_token_count
                    first = message.finished.explanation.attempts[0]
                    reply.replica = first.prefill_replica or first.decode_replica
                    reply.prefill_s = first.prefill.ToNanoseconds() / 1e9
        except grpc.aio.AioRpcError as error:
            reply.error = from_rpc_error(error).reason or error.code().name
        return reply


async def serve(asker: Asker[Any]) -> None:
    """Serve until stdin ends."""
    player: Player[Any] | None = None

    async def open_(command: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal player
        plan = [[Turn(*turn) for turn in turns] for turns in command["plan"]]
        player = Player(asker, plan, command["seed"])
        return {}

    async def warm(command: Mapping[str, Any]) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        return {"failed": await player.warm(command["seed"])}

    async def play(command: Mapping[str, Any]) -> Mapping[str, Any]:
        assert player is not None, "nothing was opened"
        taken = await player.play(command["until_s"])
        return {"taken": taken, "stood_still_s": player.stood_still_s}

    await control.serve_commands({"open": open_, "warm": warm, "play": play}, {"ready": True})


async def serve_mesh(target: str) -> None:
    """Serve conversations with the mesh whose frontend is at `target`."""
    async with grpc.aio.insecure_channel(target) as channel:
        await serve(MeshAsker(inference_pb2_grpc.InferenceServiceStub(channel)))


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.conversation_client", description=__doc__)
    parser.add_argument("--target", required=True, help="host:port of the frontend")
    uvloop.run(serve_mesh(parser.parse_args().target))


if __name__ == "__main__":
    main()
