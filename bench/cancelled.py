"""What grpcio itself keeps of each call that is cancelled: `python -m bench.cancelled [--json]`.

Bare grpc.aio on both ends, no code of the mesh between them. A figure is the growth of malloc (mallinfo2(3))
over CALLS calls, behind as many that warm the process up, per call.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

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
    """Return the bytes that malloc has given out and not got back, garbage of Python apart."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().values[_IN_USE])


async def serve() -> None:
    """Serve METHOD until stdin ends; answer each line of stdin with the bytes in use."""

    async def stream(_: bytes, context: Any) -> None:
        while True:
            await context.write(PAYLOAD)
            await asyncio.sleep(0.001)

    async def brief(_: bytes, context: Any) -> None:
        await context.write(PAYLOAD)

    handlers = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Brief": grpc.unary_stream_rpc_method_handler(brief),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Cancelled", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    while await asyncio.to_thread(sys.stdin.readline):
        print(allocated_bytes(), flush=True)
    await server.stop(0)


async def finish(channel: grpc.aio.Channel) -> None:
    """Read a call to its end: the figure beside which the others stand."""
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
    """Read once; False when the call is over."""
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


async def measure() -> dict[str, dict[str, float]]:
    """Return bytes per call, of the client and of the server, for each way to end a call."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.cancelled", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    port = int(await server.stdout.readline())
    figures: dict[str, dict[str, float]] = {}

    async def in_use() -> tuple[int, int]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(b"\n")
        return allocated_bytes(), int(await server.stdout.readline())

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, way in WAYS.items():
            await _calls(channel, way)
            before = await in_use()
            await _calls(channel, way)
            after = await in_use()
            client, served = ((late - early) / CALLS for early, late in zip(before, after, strict=True))
            figures[name] = {
                "client_bytes_per_call": round(client, 1),
                "server_bytes_per_call": round(served, 1),
            }
    server.stdin.close()
    await server.wait()
    return figures


async def _calls(channel: grpc.aio.Channel, way: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    async def some() -> None:
        for _ in range(CALLS // AT_ONCE):
            await way(channel)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.cancelled", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve())
        return
    figures = asyncio.run(measure())
    if given.json:
        print(json.dumps({"grpcio": grpc.__version__, "calls": CALLS, "ways": figures}, indent=1))
        return
    print(f"grpcio {grpc.__version__}, {CALLS} calls each; bytes that stay per call")
    for name, figure in figures.items():
        print(
            f"  {name:30} client {figure['client_bytes_per_call']:8.1f}   server {figure['server_bytes_per_call']:8.1f}"
        )


if __name__ == "__main__":
    main()
