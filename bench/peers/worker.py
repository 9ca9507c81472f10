"""A mock worker: OpenAI chat completions over HTTP/1.1, `tok0 tok1 ...` at a fixed pace, and the other calls of routers.

`python -m bench.peers.worker --port P --name worker-2 --interval-s 0.02` serves loopback until it is ended. The name is
the `system_fingerprint` of every event, so a client knows its worker.
"""

from __future__ import annotations

import asyncio
import json
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bench import control
from bench.peers import chat

HEAD_BYTES_MAX = 1 << 16
BODY_BYTES_MAX = 1 << 22
CHAT = "/v1/chat/completions"
TOKENIZERS = (f"{CHAT}/render", "/render", "/tokenize")
"""Paths at which a cache-aware router requests the ids of a prompt. The answer has one made-up id per 4 bytes."""

Head = tuple[str, str, dict[str, str]]
"""Method, path, headers by their lower-case names."""


class Worker:
    """Answers on one port. It writes the first token at once, and one token every `interval_s`."""

    def __init__(self, name: str, interval_s: float) -> None:
        self.name = name
        self.connection_count = 0
        self.interval_s = interval_s

    async def serve(self, port: int) -> asyncio.Server:
        """Listen on loopback; port 0 takes a free one."""
        return await asyncio.start_server(self._connection, "127.0.0.1", port, limit=HEAD_BYTES_MAX)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection_count += 1
        try:
            await self._requests(reader, writer)
        finally:
            self.connection_count -= 1
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            while head := await read_head(reader):
                method, path, headers = head
                body = await reader.readexactly(min(int(headers.get("content-length", 0)), BODY_BYTES_MAX))
                await self._answer(writer, method, path.partition("?")[0], body)
                if headers.get("connection", "").lower() == "close":
                    break

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        if method == "POST" and path == CHAT:
            asked = json.loads(body)
            # sglang-router forwards `max_tokens` under the newer name.
            tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
            used = await self.compute(asked, tokens)
            if asked.get("stream"):
                await self._stream(writer, tokens, used)
                return
            await _reply(writer, self._whole(tokens))
        elif path in TOKENIZERS:
            ids = made_up_ids(body)
            await _reply(writer, {"tokens": ids, "token_ids": ids, "count": len(ids), "max_model_len": 8192})
        else:
            await _reply(writer, self._facts(path))

    def start_s(self, now_s: float) -> float:
        """Return the time of the first token of a stream that begins now. The others follow at their pace."""
        return now_s

    async def compute(self, asked: Mapping[str, Any], tokens: int) -> dict[str, Any] | None:
        """Take the prefill time of a request, here none, and return the usage to report (`chat.usage`)."""
        del asked, tokens
        return None

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int, used: dict[str, Any] | None) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        began_s = self.start_s(loop.time())
        for position in range(tokens):
            await asyncio.sleep(max(0.0, began_s + position * self.interval_s - loop.time()))
            _write_chunk(writer, chat.chunk(self.name, chat.token_text(position)))
            await writer.drain()
        _write_chunk(writer, chat.chunk(self.name, None, "length", used) + chat.event(chat.DONE))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _whole(self, tokens: int) -> dict[str, Any]:
        text = "".join(map(chat.token_text, range(tokens)))
        return {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": chat.MODEL,
            "system_fingerprint": self.name,
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
        }

    def _facts(self, path: str) -> dict[str, Any]:
        """Return the facts that a router reads at start and periodically. Health checks need the status alone."""
        if path == "/v1/models":
            model = {"id": chat.MODEL, "object": "model", "created": 0, "owned_by": "mock"}
            return {"object": "list", "data": [{**model, "max_model_len": 8192}]}
        names = dict.fromkeys(("model_id", "model_path", "served_model_name"), chat.MODEL)
        facts = {"status": "ok", "version": "0", **names, "tokenizer_path": "", "is_generation": True}
        return {**facts, "max_model_len": 8192, "load": 0, "loads": []}


def made_up_ids(body: bytes) -> list[int]:
    """Return an id per 4 bytes of a prompt. Prompts with common text have common ids."""
    asked = json.loads(body)
    messages = asked.get("messages") or [{"content": asked.get("prompt", "")}]
    text = "".join(str(message["content"]) for message in messages).encode()
    return [zlib.crc32(text[at : at + 4]) >> 8 for at in range(0, len(text), 4)]


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return method, path and headers of a request; None if the peer has closed."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, path, *_ = lines[0].split(" ")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return method, path, {name.lower(): value.strip() for name, _, value in pairs}


async def _reply(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    await writer.drain()


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(port: int, name: str, interval_s: float) -> None:
    """Serve until the process ends."""
    async with await Worker(name, interval_s).serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    control.main(serve, __doc__)
