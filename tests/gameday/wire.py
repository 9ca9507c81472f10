"""A peer for measuring the wire between two stations, and its clients. Needs no installed packages.

`python -m tests.gameday.wire serve` echoes each line of a TCP connection, except "seen": its answer is the count of
datagrams from each address. `... rtt HOST` prints the seconds of the quickest round trip, `... bulk HOST` those of 4 MB and
their echo. `... stay HOST` sends a datagram and prints the seconds of the longest of many round trips of one connection.
`... send HOST COUNT` sends datagrams.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from typing import Final

PORT: Final = 7070
ROUND_TRIPS: Final = 10
STAY_ROUND_TRIPS: Final = 60
BULK_BYTES: Final = 4 << 20
CONNECT_S_MAX: Final = 2.0


class _Sink(asyncio.DatagramProtocol):
    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._seen[addr[0]] += 1


async def serve() -> None:
    """Serve until the process ends."""
    seen: Counter[str] = Counter()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(seen).encode() + b"\n" if line == b"seen\n" else line)
            await writer.drain()
        writer.close()

    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: _Sink(seen), local_addr=("0.0.0.0", PORT))
    server = await asyncio.start_server(on_connection, "0.0.0.0", PORT, limit=2 * BULK_BYTES)
    await server.serve_forever()


def connected(host: str) -> socket.socket:
    """Return a connection to the peer. Raises OSError."""
    connection = socket.create_connection((host, PORT), CONNECT_S_MAX)
    connection.settimeout(30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def round_trip(connection: socket.socket, line: bytes = b"x\n") -> bytes:
    """Return the answer to `line`."""
    connection.sendall(line)
    answer = b""
    while not answer.endswith(b"\n"):
        answer += connection.recv(1 << 20)
    return answer


def quickest_s(host: str) -> float:
    """Return the seconds of the quickest round trip, since a busy machine only adds time."""
    with connected(host) as connection:
        return min(_timed(connection, b"x\n") for _ in range(ROUND_TRIPS))


def bulk_s(host: str) -> float:
    """Return the seconds until BULK_BYTES have come back."""
    with connected(host) as connection:
        return _timed(connection, b"x" * (BULK_BYTES - 1) + b"\n")


def longest_s(host: str) -> float:
    """Return the seconds of the longest round trip of a connection. A datagram tells the peer that it is open."""
    with connected(host) as connection:
        round_trip(connection)
        send(host, 1)
        return max(_timed(connection, b"x\n") for _ in range(STAY_ROUND_TRIPS))


def send(host: str, count: int) -> None:
    """Send datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(b"x", (host, PORT))


def _timed(connection: socket.socket, line: bytes) -> float:
    began_s = time.monotonic()
    round_trip(connection, line)
    return time.monotonic() - began_s


def main(command: str, *arguments: str) -> None:
    match command:
        case "serve":
            asyncio.run(serve())
        case "rtt":
            print(quickest_s(*arguments))
        case "bulk":
            print(bulk_s(*arguments))
        case "stay":
            print(longest_s(*arguments))
        case "send":
            send(arguments[0], int(arguments[1]))
        case _:
            raise SystemExit(f'"{command}" is no command: use serve, rtt, bulk, stay or send')


if __name__ == "__main__":
    main(*sys.argv[1:])
