"""A client that does not read: it costs one window of credit, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.progress import CREDIT_WINDOW
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool, oracle


class StuckCall:
    """A Call whose writes end only when the test lets them."""

    def __init__(self) -> None:
        self.metadata: Mapping[str, str] = {}
        self.identities: Sequence[str] = ()
        self.allowed = asyncio.Semaphore(0)
        self.messages: list[pb.GenerateResponse] = []

    def remaining_s(self) -> float | None:
        return 60.0

    async def read(self) -> bytes | None:
        return None

    async def write(self, message: pb.GenerateResponse) -> None:
        await self.allowed.acquire()
        self.messages.append(message)

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        pass


async def test_an_unread_stream_costs_one_window_and_delays_nobody(serving: Serving, pool: Pool) -> None:
    """The engine goes on; the mesh sends one window; what piled up leaves as one message."""
    asked = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[9, 9, 9]), limits=pb.Limits(max_output_tokens=300))
    stuck = StuckCall()
    slow = asyncio.create_task(serving.frontend.service.serve(asked.SerializeToString(), stuck))
    await until(lambda: bool(pool.runs) and pool.runs[0].log.end == 300, "the engine is done")
    run = pool.runs[0]
    assert run.log.sent == CREDIT_WINDOW
    quick = [
        each
        async for reply in serving.stub.Generate(
            pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[8]), limits=pb.Limits(max_output_tokens=100))
        )
        for each in reply.tokens.ids
    ]
    assert quick == oracle([8], 100)
    assert run.log.sent == CREDIT_WINDOW
    stuck.allowed.release()  # started
    stuck.allowed.release()  # everything that piled up
    await until(lambda: len(stuck.messages) == 2, "two messages")
    assert len(stuck.messages[1].tokens.ids) == CREDIT_WINDOW
    for _ in range(400):
        stuck.allowed.release()
    await asyncio.wait_for(slow, 5)
    ids = [each for message in stuck.messages for each in message.tokens.ids]
    assert ids == oracle([9, 9, 9], 300)
    assert len(stuck.messages) < 20
    await serving.until_empty()
