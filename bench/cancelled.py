"""Memory that grpcio itself keeps of each cancelled call: `python -m bench.cancelled [--json]`.

Both ends are bare grpc.aio, without code of the mesh between them. A figure is the growth of malloc (mallinfo2(3)) per
call, over CALLS calls. As many calls before them warm the process up.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import grpc
import typer

from bench import control
from bench.processes import ANY_CORE, START_TIMEOUT_S, Fleet

CALLS: Final = 8000
AT_ONCE: Final = 16
METHOD: Final = "/bench.Cancelled/Stream"
PAYLOAD: Final = b"x" * 200

_FIELDS: Final = 10
_IN_USE: Final = 7
"""Index of uordblks in struct mallinfo2."""


class _MallocInfo(ctypes.Structure):
    _fields_ = [("values", ctypes.c_size_t * _FIELDS)]


def allocated_bytes() -> int:
    """Return the bytes that malloc has in use, after a collection of Python's garbage."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().values[_IN_USE])


async def serve() -> None:
    """Serve METHOD until stdin ends. The command in_use returns the bytes in use."""

    async def stream(_: bytes, context: Any) -> None:
        while True:
            await context.write(PAYLOAD)
            await asyncio.sleep(0.001)

    async def brief(_: bytes, context: Any) -> None:
        await context.write(PAYLOAD)

    async def in_use() -> Mapping[str, Any]:
        return {"bytes": allocated_bytes()}

    handlers = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Brief": grpc.unary_stream_rpc_method_handler(brief),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Cancelled", handlers),))
    async with control.serving(server) as address:
        await control.serve_commands(in_use, address=address)


async def finish(channel: grpc.aio.Channel) -> None:
    """Read a call to its end: the baseline of the other figures."""
    call: Any = channel.unary_stream(METHOD.replace("Stream", "Brief"), None, None)(b"")
    while await _is_open(call):
        pass


async def cancel_call(channel: grpc.aio.Channel) -> None:
    """Cancel the call between two reads."""
    call: Any = channel.unary_stream(METHOD, None, None)(b"")
    await call.read()
    call.cancel()
    while await _is_open(call):
        pass


async def cancel_task(channel: grpc.aio.Channel) -> None:
    """Cancel the task that reads the call."""
    call: Any = channel.unary_stream(METHOD, None, None)(b"")
    await call.read()
    reading = asyncio.create_task(_is_open(call))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await call.code()


async def _is_open(call: Any) -> bool:
    """Read once. Return False when the call is over."""
    try:
        await call.read()
    except asyncio.CancelledError:
        if not call.done():
            raise
    return not call.done()


WAYS: Final[dict[str, Callable[[grpc.aio.Channel], Awaitable[None]]]] = {
    "read to the end": finish,
    "cancelled by call.cancel()": cancel_call,
    "cancelled by the reading task": cancel_task,
}


async def measure(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Return the bytes per call of client and server for each way to end a call."""
    server = fleet.start("server", [sys.executable, "-m", "bench.cancelled", "--serve"], ANY_CORE)
    figures: dict[str, dict[str, float]] = {}
    async with grpc.aio.insecure_channel(server.read_answer(START_TIMEOUT_S)["address"]) as channel:
        for name, way in WAYS.items():
            await _calls(channel, way)
            before = (allocated_bytes(), server.ask("in_use")["bytes"])
            await _calls(channel, way)
            after = (allocated_bytes(), server.ask("in_use")["bytes"])
            client, served = ((late - early) / CALLS for early, late in zip(before, after, strict=True))
            figures[name] = {
                "client_bytes_per_call": round(client, 1),
                "server_bytes_per_call": round(served, 1),
            }
    return figures


async def _calls(channel: grpc.aio.Channel, way: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def some() -> None:
        for _ in range(CALLS // AT_ONCE):
            await way(channel)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    is_server: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> None:
    """Measure the memory that grpcio itself keeps of each cancelled call."""
    if is_server:
        asyncio.run(serve())
        return
    with Fleet() as fleet:
        figures = asyncio.run(measure(fleet))
    if as_json:
        print(json.dumps({"grpcio": grpc.__version__, "calls": CALLS, "ways": figures}, indent=1))
        return
    print(f"grpcio {grpc.__version__}, {CALLS} calls each; bytes that stay per call")
    for name, figure in figures.items():
        client, served = figure.values()
        print(f"  {name:30} client {client:8.1f}   server {served:8.1f}")


if __name__ == "__main__":
    typer.run(main)
