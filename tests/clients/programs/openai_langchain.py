"""LangChain's ChatOpenAI. It runs in an environment of its own. See tests/clients/openai_driver.py."""

from __future__ import annotations

import ssl
from typing import Any

import httpx
from langchain_openai import ChatOpenAI

from tests.clients.programs.openai_commands import Command, Loop, serve

LOOP = Loop()


def _model(command: Command) -> Any:
    more = {}
    if command["authority"]:
        context = ssl.create_default_context(cafile=command["authority"])
        more = {
            "http_client": httpx.Client(verify=context),
            "http_async_client": httpx.AsyncClient(verify=context),
        }
    return ChatOpenAI(
        model=command["model"],
        base_url=command["base_url"],
        api_key=command["api_key"],
        extra_body=command["extra"] or None,
        stream_usage=True,
        **command["parameters"],
        **more,
    )


def _messages(command: Command) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in command["messages"]]


def _whole(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    return {
        "text": message.content,
        "finish_reason": message.response_metadata.get("finish_reason"),
        "usage": [usage["input_tokens"], usage["output_tokens"]] if usage else None,
    }


class _Chunks:
    def __init__(self, leave_after: int) -> None:
        self._leave_after = leave_after
        self._sum: Any = None
        self._count = 0

    def take(self, chunk: Any) -> bool:
        """Take a chunk. True: the client has enough."""
        self._sum = chunk if self._sum is None else self._sum + chunk
        self._count += bool(chunk.content)
        return 0 < self._leave_after <= self._count

    def seen(self) -> dict[str, Any]:
        """Return the answer so far."""
        return {**_whole(self._sum), "chunk_count": self._count}


def sync(command: Command) -> dict[str, Any]:
    """`invoke` and `stream`."""
    model, messages = _model(command), _messages(command)
    if not command["streams"]:
        return _whole(model.invoke(messages))
    chunks = _Chunks(command["leave_after"])
    for chunk in model.stream(messages):
        if chunks.take(chunk):
            break
    return chunks.seen()


async def _aio(command: Command) -> dict[str, Any]:
    model, messages = _model(command), _messages(command)
    if not command["streams"]:
        return _whole(await model.ainvoke(messages))
    chunks = _Chunks(command["leave_after"])
    stream = model.astream(messages)
    async for chunk in stream:
        if chunks.take(chunk):
            break
    await stream.aclose()
    return chunks.seen()


def aio(command: Command) -> dict[str, Any]:
    """`ainvoke` and `astream`."""
    return LOOP.run(_aio(command))


def batch(command: Command) -> dict[str, Any]:
    """`batch`: the same prompt several times at once."""
    answers = _model(command).batch([_messages(command)] * 4)
    assert len({each.content for each in answers}) == 1, "answers to equal prompts differ"
    return _whole(answers[0])


def tools(command: Command) -> dict[str, Any]:
    """A model with tools bound. The mesh passes them to the template and returns text."""

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return city

    return _whole(_model(command).bind_tools([weather]).invoke(_messages(command)))


def structured(command: Command) -> dict[str, Any]:
    """`with_structured_output` by a JSON schema."""
    schema = {
        "title": "Colour",
        "type": "object",
        "properties": {"name": {"type": "string"}, "dark": {"type": "boolean"}},
        "required": ["name", "dark"],
        "additionalProperties": False,
    }
    found = _model(command).with_structured_output(schema, method="json_schema").invoke(_messages(command))
    return {"text": "", "parsed": found}


def turns(command: Command) -> dict[str, Any]:
    """A second turn with the message object of the first answer."""
    model, messages = _model(command), _messages(command)
    first = model.invoke(messages)
    return _whole(model.invoke([*messages, first, ("user", command["next"])]))


if __name__ == "__main__":
    serve({"sync": sync, "aio": aio, "batch": batch, "tools": tools, "parse": structured, "turns": turns})
