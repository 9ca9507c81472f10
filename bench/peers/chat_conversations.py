"""Conversations as chat completions over HTTP, with a router or a worker at 127.0.0.1.

Run as `python -m bench.peers.chat_conversations --port P`. The commands are those of bench.conversation_mesh.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bench import control
from bench.conversation_mesh import DEADLINE_S, serve
from bench.conversation_player import Reply
from bench.peers import chat
from bench.peers.caching_worker import words_of
from bench.peers.chat_client import ChatConnection
from bench.peers.streams import Outcome, Stream

ROLES = ("system", "user", "assistant")


class ChatBackend:
    """Implements Backend with words."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[ChatConnection] = []

    def fresh(self, count: int, draw: random.Random) -> list[str]:
        """See Backend."""
        return [f"{draw.getrandbits(24):06x}" for _ in range(count)]

    def prompt(self, said: Sequence[Sequence[str]]) -> list[str]:
        """See Backend."""
        return words_of(messages(said))

    async def ask(self, said: Sequence[Sequence[str]], output_tokens: int) -> Reply[str]:
        """See Backend."""
        now = asyncio.get_running_loop().time
        connection = self._idle.pop() if self._idle else ChatConnection(self._port, DEADLINE_S)
        record, answer = Stream(0.0), chat.Answer(output_tokens)
        await connection.send(chat.conversation_body(messages(said), output_tokens), answer, record, now())
        self._idle.append(connection)
        if record.outcome is not Outcome.DONE:
            return Reply(ttft_s=record.first_s, error=record.detail or "not done")
        if answer.cached_tokens is None:
            return Reply(ttft_s=record.first_s, error="cached tokens were not reported")
        tokens = [chat.token_text(position).strip() for position in range(output_tokens)]
        return Reply(tokens, record.first_s, "", answer.cached_tokens, answer.worker)

    def close(self) -> None:
        """Close the connections that no request uses."""
        for connection in self._idle:
            connection.close()


def messages(said: Sequence[Sequence[str]]) -> list[chat.Message]:
    """Return the messages of system, user, assistant, user, ...."""
    return [
        {"role": ROLES[0] if not index else ROLES[2 - index % 2], "content": " ".join(words)}
        for index, words in enumerate(said)
    ]


async def serve_chat(port: int) -> None:
    """Serve conversations with the server at `port`."""
    await serve(ChatBackend(port))


if __name__ == "__main__":
    control.main(serve_chat, __doc__)
