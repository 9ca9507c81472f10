"""A client of chat completions over HTTP/1.1 that reads and checks every byte."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

from bench.peers import chat, worker
from bench.peers.streams import Outcome, Stream

MUTE_S = 15.0
"""Silence after which a stream counts as lost."""


class BadFraming(Exception):
    """The peer violated HTTP."""


class ChatConnection:
    """A connection to a router at 127.0.0.1: kept alive over requests, opened again after a failure."""

    def __init__(self, port: int, mute_s: float | None = None, served: chat.Served | None = None) -> None:
        """`mute_s`: another limit of silence than MUTE_S. `served`: the model at the port, by default the mock one."""
        self._port = port
        self._served = served or chat.Served()
        self._mute_s = MUTE_S if mute_s is None else mute_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, prompt: str, tokens: int, record: Stream, began_s: float) -> None:
        """Send a prompt and read its answer into `record`. `began_s`: the loop's time at 0 of the run's clock."""
        served = self._served
        answer = chat.Answer(tokens, served.text_of)
        await self.send(chat.request_body(prompt, tokens, served), answer, record, began_s)

    async def send(self, request: bytes, answer: chat.Answer, record: Stream, began_s: float) -> None:
        """Send the body of a request and read the answer into `answer` and `record`."""
        now = asyncio.get_running_loop().time
        cut = ""
        try:
            async for data in self._body(request):
                came = answer.feed(data)
                if came:
                    record.arrive(now() - began_s, came)
        except TimeoutError:
            cut = f"mute for {self._mute_s:g} s"
        except (OSError, asyncio.IncompleteReadError):
            cut = "connection cut"
        except BadFraming as error:
            cut = str(error)
        outcome, detail = answer.verdict(cut)
        record.workers = [answer.worker] if answer.worker else []
        record.end(now() - began_s, outcome, detail)
        if outcome is not Outcome.DONE:
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _body(self, body: bytes) -> AsyncIterator[bytes]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            with suppress(OSError):
                self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = self._reader, self._writer
        more = "".join(f"{name}: {value}\r\n" for name, value in self._served.headers.items())
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
            % (worker.CHAT.encode(), len(body), more.encode())
            + body
        )
        async with asyncio.timeout(self._mute_s):
            await writer.drain()
            head = await worker.read_head(reader)
        if head is None:
            raise ConnectionResetError
        _, status, headers = head
        if status != "200":
            raise BadFraming(f"status {status}")
        if headers.get("transfer-encoding", "").lower() != "chunked":
            raise BadFraming("not chunked")
        while True:
            async with asyncio.timeout(self._mute_s):
                size = _chunk_size(await reader.readuntil(b"\r\n"))
                data = await reader.readexactly(size + 2)
            if data[-2:] != b"\r\n":
                raise BadFraming("a chunk without its end")
            if not size:
                return
            yield data[:-2]


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadFraming("a chunk without its size") from None
