"""The client on grpc.aio."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from contextlib import suppress
from typing import Any

import grpc

from tests.clients.programs.grpcio_commands import Record, credentials, options, say


class Calls:
    """The channels of the process."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def run(self, command: dict[str, Any]) -> None:
        """Make the calls of one command."""
        began = asyncio.Event()

        def begin() -> None:
            if not began.is_set():
                began.set()
                say(command["id"], first=True)

        calls = [self._call(command, begin) for _ in range(command["count"])]
        say(command["id"], outcomes=await asyncio.gather(*calls))

    def _channel(self, command: dict[str, Any]) -> grpc.aio.Channel:
        name = command["channel"]
        if name not in self._channels:
            trusted, target = credentials(command), command["target"]
            self._channels[name] = (
                grpc.aio.secure_channel(target, trusted, options(command))
                if trusted
                else grpc.aio.insecure_channel(target, options(command))
            )
        return self._channels[name]

    async def _call(self, command: dict[str, Any], begin: Any) -> dict[str, Any]:
        record, channel, path = Record(command), self._channel(command), command["path"]
        request = base64.b64decode(command["request"])
        keywords = {
            "timeout": command["deadline_s"],
            "metadata": [tuple(each) for each in command["metadata"]],
            "compression": grpc.Compression.Gzip if command["gzip"] else None,
        }
        call: Any
        try:
            if command["streams"]:
                call = channel.unary_stream(path, None, None)(request, **keywords)
                async for message in call:
                    record.take(message)
                    begin()
                    if record.message_count == command["cancel_after"]:
                        call.cancel()
            else:
                call = channel.unary_unary(path, None, None)(request, **keywords)
                record.take(await call)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        return record.end(await call.code(), await call.details(), await call.trailing_metadata())


async def main() -> None:
    """Serve commands until stdin ends."""
    reader, calls, tasks = asyncio.StreamReader(limit=64 << 20), Calls(), set()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        task = asyncio.create_task(calls.run(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


with suppress(KeyboardInterrupt):
    asyncio.run(main())
