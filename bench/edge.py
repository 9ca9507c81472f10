"""A frontend with nothing behind it: the least a grpc.aio server can do to stream one message per token and client.

The floor under the frontend. Run as `python -m bench.edge`, steered over stdin.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from bench import control
from bench.pacing import token_id_at
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc


class Edge(inference_pb2_grpc.InferenceServiceServicer):
    """Gives every live call one token per step."""

    def __init__(self) -> None:
        self.step_s = 0.02
        self._steps: set[asyncio.Event] = set()

    async def Generate(  # type: ignore[override]  # named by the protocol; writes instead of yielding
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream tokens until the limit."""
        step = asyncio.Event()
        self._steps.add(step)
        try:
            for position in range(request.limits.max_output_tokens):
                if position:
                    await step.wait()
                    step.clear()
                tokens = pb.Tokens(text=" word", ids=(token_id_at(position),), position=position)
                await context.write(pb.GenerateResponse(tokens=tokens))
        finally:
            self._steps.discard(step)

    async def run(self) -> None:
        """Step at multiples of the step time, until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self.step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for step in self._steps:
                step.set()


async def serve() -> None:
    """Serve until stdin ends."""
    edge = Edge()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(edge, server)

    async def pace(step_ms: float) -> None:
        edge.step_s = step_ms / 1000

    async with asyncio.TaskGroup() as tasks, control.serving(server) as address:
        stepping = tasks.create_task(edge.run(), name="edge-steps")
        await control.serve_commands(pace, address=address)
        stepping.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)
