"""Calls of clients that read or write slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvmesh.inference.v1 import inference_pb2 as pb


class StuckCall:
    """A call with writes that end when the test allows it."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.metadata: Mapping[str, str] = {}
        self.identities: Sequence[str] = ()
        self.peer = "stuck"
        self.allowed = asyncio.Semaphore(0)
        self.messages: list[pb.GenerateResponse] = []

    def remaining_s(self) -> float | None:
        return 60.0

    async def read(self) -> bytes | None:
        return self.message

    def try_write(self, message: object) -> bool:
        return False

    async def write(self, message: pb.GenerateResponse) -> None:
        await self.allowed.acquire()
        self.messages.append(message)

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        pass


class LateCall(StuckCall):
    """A call that is read at once, with a message that took 5 of its 60 seconds to arrive."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.allowed = asyncio.Semaphore(1 << 20)
        self.left_s = 60.0

    def remaining_s(self) -> float | None:
        return self.left_s

    async def read(self) -> bytes | None:
        self.left_s -= 5.0
        return self.message


def asking(count: int) -> bytes:
    """Return the message of a request for `count` tokens."""
    message = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[9]), limits=pb.Limits(max_output_tokens=count))
    return message.SerializeToString()
