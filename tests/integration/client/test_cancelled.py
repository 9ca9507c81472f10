"""Cancelled readers: no memory of their streams is leaked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from kvmesh.client import Client
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.allocated import allocated_bytes
from tests.integration.client.scripted_frontend import IDS, ScriptedFrontend, scripted


async def endless(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
    """Write a token each millisecond while the call is open."""
    await context.write(pb.GenerateResponse(started=pb.Started(request_id="r", max_output_tokens=4096)))
    for position in range(4096):
        tokens = pb.Tokens(position=position, ids=IDS[:1], text="a" * 200)
        await context.write(pb.GenerateResponse(tokens=tokens))
        await asyncio.sleep(0.001)


async def test_a_cancelled_reader_leaves_no_memory_behind() -> None:
    """Cancelling the task or closing the generation frees the messages that the frontend has sent afterwards, too."""
    chance = random.Random(2)
    async with scripted(endless) as frontend, Client([frontend.address]) as client:

        async def read(came: asyncio.Event) -> None:
            async for _ in client.generate(prompt_tokens=[1, 2, 3], max_output_tokens=4096):
                came.set()

        async def leave(count: int) -> None:
            for _ in range(count):
                came = asyncio.Event()
                reading = asyncio.create_task(read(came))
                await came.wait()
                await asyncio.sleep(chance.random() * 0.01)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

        async def allocated(count: int) -> int:
            before = frontend.cancelled
            await asyncio.gather(*(leave(count // 8) for _ in range(8)))
            while frontend.cancelled - before < count:
                await asyncio.sleep(0.01)
            frontend.requests.clear()
            return allocated_bytes()

        before = await allocated(160)
        assert await allocated(400) - before < 400 * 500  # 1,200 bytes each, if they leak
