"""What Python clients of OpenAI's API share; imports no package. See tests/clients/openai_driver.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

Command = Mapping[str, Any]
Way = Callable[[Command], Any]


class Loop:
    """An event loop that runs all the time, as that of an application: it closes the streams that a client left."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, asked: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the result."""
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


def serve(ways: Mapping[str, Way]) -> None:
    """Answer commands until the end of the input. `ways`: what each way of the client does with a command."""
    # Some packages print to stdout; answers alone may stand there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            seen = ways[command["way"]](command)
        except Exception as error:  # noqa: BLE001  # each is an answer
            seen = {"error": told(error)}
        answers.write(json.dumps(seen) + "\n")


def told(error: BaseException) -> dict[str, Any]:
    """Return an exception with the fields that the openai package gives it."""
    return {
        "classes": [f"{each.__module__.split('.')[0]}.{each.__name__}" for each in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "code": getattr(error, "code", None),
        "param": getattr(error, "param", None),
        "message": str(error)[:600],
    }


def asked_again(command: Command, answer: Any) -> dict[str, Any]:
    """Return the command of the next turn. `answer`: the message of the assistant, as the client has it."""
    return {
        **command,
        "messages": [*command["messages"], answer, {"role": "user", "content": command["next"]}],
    }


def usage_of(given: Any) -> list[int] | None:
    """Return prompt and completion tokens of an OpenAI usage; None: there is none."""
    return None if given is None else [given.prompt_tokens, given.completion_tokens]


def whole_of(answer: Any) -> dict[str, Any]:
    """Return what a whole answer has."""
    choice = answer.choices[0]
    return {
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "usage": usage_of(answer.usage),
    }


class Chunks:
    """What the chunks of a stream have together."""

    def __init__(self, leave_after: int) -> None:
        """`leave_after`: chunks with text after which the client leaves; 0: it stays."""
        self._leave_after = leave_after
        self._texts: list[str] = []
        self._reason: str | None = None
        self._usage: list[int] | None = None

    def take(self, chunk: Any) -> bool:
        """Take a chunk. True: the client has enough."""
        self._usage = usage_of(getattr(chunk, "usage", None)) or self._usage
        for choice in chunk.choices:
            if choice.delta.content:
                self._texts.append(choice.delta.content)
            self._reason = choice.finish_reason or self._reason
        return 0 < self._leave_after <= len(self._texts)

    def seen(self) -> dict[str, Any]:
        """Return the answer so far."""
        return {
            "text": "".join(self._texts),
            "finish_reason": self._reason,
            "usage": self._usage,
            "chunk_count": len(self._texts),
        }
