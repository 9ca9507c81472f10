"""The client of tests: sends requests, checks the contract of the stream, collects the output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvmesh.inference.v1 import inference_pb2 as pb


@dataclass
class Answer:
    """The result of one call: tokens in order, and its end."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    top_ids: list[list[int]] = field(default_factory=list)
    """The most likely tokens beside each token, if the request asked for them."""
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def code(self) -> grpc.StatusCode:
        """Status of the call."""
        return grpc.StatusCode.OK if self.error is None else self.error.code()


def token_request(
    ids: Sequence[int], *, max_output_tokens: int, seed: int = 1, temperature: float = 0.0, **options: Any
) -> pb.GenerateRequest:
    """Return a request for a prompt of token ids."""
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=ids))
    request.sampling.temperature = temperature
    request.sampling.seed = seed
    request.limits.max_output_tokens = max_output_tokens
    for name, value in options.items():
        setattr(request.options, name, value)
    return request


async def generate(
    stub: Any,
    request: pb.GenerateRequest,
    *,
    timeout_s: float = 120.0,
    on_tokens: Callable[[Answer], None] | None = None,
    first: Sequence[int] = (),
) -> Answer:
    """Send `request`, check that its stream follows the contract of the proto, and return the result.

    `first`: tokens that the client has already, of a stream that it resumes. They are part of the answer's tokens.
    """
    answer = Answer(list(first))
    call = stub.Generate(request, timeout=timeout_s)
    try:
        async for message in call:
            assert answer.finished is None, "a message after the last one"
            match message.WhichOneof("event"):
                case "started":
                    assert answer.started is None, "started twice"
                    answer.started = message.started
                case "tokens":
                    assert answer.started is not None, "tokens before started"
                    have = len(answer.ids)
                    assert message.tokens.position == have or not message.tokens.ids, (
                        f"position {message.tokens.position} behind {have} tokens"
                    )
                    answer.ids += message.tokens.ids
                    answer.text += message.tokens.text
                    answer.top_ids += [list(each.ids) for each in message.tokens.top_logprobs]
                    if on_tokens is not None:
                        on_tokens(answer)
                case "finished":
                    answer.finished = message.finished
                    assert message.finished.usage.output_token_count == len(answer.ids)
                case other:
                    raise AssertionError(f"unknown event {other}")
        assert answer.finished is not None, "the stream ended OK without a last message"
    except grpc.aio.AioRpcError as error:
        answer.error = error
    finally:
        call.cancel()
    return answer


async def generate_all(
    stub: Any, requests: Sequence[pb.GenerateRequest], *, concurrency: int, timeout_s: float = 300.0
) -> list[Answer]:
    """Send `requests`, at most `concurrency` at once, and return the results in their order."""
    gate = asyncio.Semaphore(concurrency)

    async def one(request: pb.GenerateRequest) -> Answer:
        async with gate:
            return await generate(stub, request, timeout_s=timeout_s)

    return await asyncio.gather(*(one(request) for request in requests))
