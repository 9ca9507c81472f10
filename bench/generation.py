"""Generate calls of the client API: a request, and its answer read to the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"
FIRST_ID = 400
"""Lower ids may be control tokens or single bytes."""
LAST_ID = 3900
Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Answer:
    """The answer to one request."""

    ttft_s: float | None = None
    ids: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: str = ""
    """Reason of the error, or its status; empty if there was none."""
    retry_after_s: float | None = None


class AnswerCheck:
    """Checks an answer of `expected` tokens, message by message."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._position = 0
        self._is_finished = False
        self._fault = ""

    def take(self, message: pb.GenerateResponse) -> int:
        """Take a message and return its number of tokens."""
        match message.WhichOneof("event"):
            case "tokens" if message.tokens.ids:
                if message.tokens.position != self._position and not self._fault:
                    self._fault = f"wrong: position {message.tokens.position}, expected {self._position}"
                self._position += len(message.tokens.ids)
                return len(message.tokens.ids)
            case "finished":
                self._is_finished = message.finished.finish_reason == pb.FINISH_REASON_LENGTH
            case _:
                pass
        return 0

    def verdict(self) -> str:
        """Return the error of the ended answer; empty: there was none."""
        if self._fault:
            return self._fault
        if self._is_finished and self._position == self._expected:
            return ""
        return f"lost: {self._position} of {self._expected} tokens"


@asynccontextmanager
async def channel(target: str) -> AsyncIterator[Stub]:
    """Yield a stub of the frontend at `target`, and close its channel after use."""
    async with grpc.aio.insecure_channel(target) as opened:
        yield inference_pb2_grpc.InferenceServiceStub(opened)


def random_ids(count: int, draw: random.Random) -> list[int]:
    """Return random token ids: a prompt without cached blocks."""
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def bearer(key: str) -> Metadata:
    """Return the metadata of a caller with `key`, nothing for an empty key."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def request(
    ids: Sequence[int], output_tokens: int, *, explain: bool = False, ignore_eos: bool = False
) -> pb.GenerateRequest:
    """Return a greedy request. `ignore_eos`: no end token ends the output."""
    return pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=ids),
        sampling=pb.Sampling(temperature=0.0, ignore_eos=ignore_eos),
        limits=pb.Limits(max_output_tokens=output_tokens),
        options=pb.GenerateOptions(explain=True) if explain else None,
    )


def text_request(text: str, output_tokens: int) -> pb.GenerateRequest:
    """Return a greedy request with text, which no end token ends."""
    return pb.GenerateRequest(
        text=text,
        sampling=pb.Sampling(temperature=0.0, ignore_eos=True),
        limits=pb.Limits(max_output_tokens=output_tokens),
    )


def chat_request(text: str, output_tokens: int) -> pb.GenerateRequest:
    """Return the same request with `text` as the message of a user."""
    asked = text_request("", output_tokens)
    asked.chat.messages.add(role=pb.ChatMessage.ROLE_USER, content=text)
    return asked


async def ask(stub: Stub, asked: pb.GenerateRequest, timeout_s: float, key: str = "") -> Answer:
    """Send a request and read its answer to the end. An error of the call is part of the answer."""
    now = asyncio.get_running_loop().time
    sent_s, answer = now(), Answer()
    call = stub.Generate(asked, timeout=timeout_s, metadata=bearer(key))
    try:
        async for message in call:
            if message.HasField("tokens") and message.tokens.ids:
                if answer.ttft_s is None:
                    answer.ttft_s = now() - sent_s
                answer.ids += message.tokens.ids
            elif message.HasField("finished"):
                answer.finished = message.finished
    except grpc.aio.AioRpcError as error:
        details = from_rpc_error(error)
        answer.error, answer.retry_after_s = details.reason or error.code().name, details.retry_after_s
    finally:
        call.cancel()
    return answer
