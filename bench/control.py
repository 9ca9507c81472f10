"""How the bench steers its neighbour processes: one JSON object per line, a command in, an answer out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


def say(answer: Mapping[str, Any]) -> None:
    """Write one answer to stdout."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def serve_commands(handlers: Mapping[str, Handler], ready: Mapping[str, Any]) -> None:
    """Say `ready`, then answer each command by the handler its `do` names, until stdin ends.

    A handler that raises answers {"error": ...}; the process goes on.
    """
    reader = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    say(ready)
    try:
        while line := await reader.readline():
            command = json.loads(line)
            try:
                say(await handlers[command["do"]](command))
            except Exception as error:  # noqa: BLE001  # told to the bench, which decides
                say({"error": f"{type(error).__name__}: {error}"})
    finally:
        transport.close()
