"""`kvmesh generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TextIO

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from kvmesh.cli.screen import explanation_table
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.inference.v1 import inference_pb2_grpc as inference_grpc
from kvmesh.server import channel

OpenChannel = Callable[[str], grpc.aio.Channel]
Message = tuple[inference.ChatMessage.Role.ValueType, str]


class RequestFailed(RuntimeError):
    """The mesh refused or lost the request; the text is one sentence."""


def chat(messages: list[Message]) -> inference.ChatPrompt:
    """Return `messages` (role, content), oldest first, as a prompt."""
    return inference.ChatPrompt(
        messages=[inference.ChatMessage(role=role, content=content) for role, content in messages]
    )


@asynccontextmanager
async def open_stream(call: Any) -> AsyncIterator[Any]:
    """Cancel `call` on the way out, however the caller leaves."""
    try:
        yield call
    finally:
        call.cancel()


async def stream(
    address: str,
    request: inference.GenerateRequest,
    deadline_s: float,
    heard: Callable[[inference.GenerateResponse], None],
    open_channel: OpenChannel = channel,
) -> inference.Finished:
    """Send `request` to the frontend at `address`, give every response to `heard`, return the last one.

    Raises RequestFailed.
    """
    finished: inference.Finished | None = None
    async with open_channel(address) as to_frontend:
        stub: Any = inference_grpc.InferenceServiceStub(to_frontend)
        try:
            async with open_stream(stub.Generate(request, timeout=deadline_s)) as responses:
                async for response in responses:
                    heard(response)
                    if response.HasField("finished"):
                        finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(_sentence(error, address)) from error
    if finished is None:
        raise RequestFailed(f"The frontend at {address} ended the stream without a last message.")
    return finished


async def generate(
    address: str,
    request: inference.GenerateRequest,
    deadline_s: float,
    *,
    as_json: bool,
    out: TextIO = sys.stdout,
    open_channel: OpenChannel = channel,
) -> int:
    """Run one request; text (or JSON lines) to `out`, explanation and errors to stderr. Returns the exit status."""
    console = Console(stderr=True)

    def heard(response: inference.GenerateResponse) -> None:
        if as_json:
            line = MessageToDict(response, preserving_proto_field_name=True)
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        elif response.HasField("tokens"):
            out.write(response.tokens.text)
        out.flush()

    try:
        finished = await stream(address, request, deadline_s, heard, open_channel)
    except RequestFailed as failed:
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        return 1
    if not as_json:
        out.write("\n")
        if request.options.explain:
            console.print(explanation_table([("this request", finished)]))
    return 0


def run_interruptible(work: Any) -> int:
    """Run the coroutine `work`; Ctrl-C cancels it and gives the shell's usual status for that."""
    try:
        status: int = asyncio.run(work)
    except KeyboardInterrupt:
        return 130
    return status


def _sentence(error: grpc.aio.AioRpcError, address: str) -> str:
    details = from_rpc_error(error)
    if not details.reason and details.code is grpc.StatusCode.UNAVAILABLE:
        return f"No frontend answers at {address}: {details.message}"
    retry = f" Try again in {details.retry_after_s:g} s." if details.retry_after_s is not None else ""
    return f"{details.code.name}: {details.message}.{retry}"
