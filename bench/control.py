"""The control protocol of load generators and stubs: JSON lines, a command on stdin, an answer on stdout."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

import grpc
import uvloop

Handler = Callable[..., Awaitable[Mapping[str, Any] | None]]
"""Takes the arguments of a command by name, and returns the answer."""


def main(serve: Callable[..., Coroutine[Any, Any, None]], about: str | None) -> None:
    """Run `serve` as a process. Its parameters are the options; those without a default are required."""
    parser = argparse.ArgumentParser(description=about)
    for name, parameter in inspect.signature(serve, eval_str=True).parameters.items():
        is_required, choices = parameter.default is parameter.empty, get_args(parameter.annotation) or None
        parser.add_argument(
            f"--{name.strip('_').replace('_', '-')}",
            dest=name,
            type=str if choices else parameter.annotation,
            choices=choices,
            required=is_required,
            default=None if is_required else parameter.default,
        )
    uvloop.run(serve(**vars(parser.parse_args())))


def say(answer: Mapping[str, Any]) -> None:
    """Write one answer to stdout."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def serve_commands(*handlers: Handler, address: str = "") -> None:
    """Announce that the process is ready, then answer commands until stdin ends.

    The `do` of a command names its handler. If the handler raises, the answer is {"error": ...} and the process goes on.
    """
    known = {handler.__name__.strip("_"): handler for handler in handlers}
    reader = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    say({"ready": True, "address": address})
    try:
        while line := await reader.readline():
            command = json.loads(line)
            try:
                say(await known[command.pop("do")](**command) or {})
            except Exception as error:  # noqa: BLE001  # the bench gets it as the answer
                say({"error": f"{type(error).__name__}: {error}"})
    finally:
        transport.close()


@asynccontextmanager
async def serving(
    server: grpc.aio.Server, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serve gRPC at a free port and yield its address."""
    anywhere = "127.0.0.1:0"
    port = (
        server.add_secure_port(anywhere, credentials) if credentials else server.add_insecure_port(anywhere)
    )
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)
