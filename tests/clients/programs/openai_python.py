"""The openai package of Python. See tests/clients/openai_driver.py."""

from __future__ import annotations

import ssl
from typing import Any

import openai

from tests.clients.programs.openai_commands import Chunks, Command, Loop, asked_again, serve, whole_of

LOOP = Loop()


def _options(command: Command) -> dict[str, Any]:
    return {"base_url": command["base_url"], "api_key": command["api_key"]}


def _body(command: Command) -> dict[str, Any]:
    more = {"stream": True, "stream_options": {"include_usage": True}} if command["streams"] else {}
    return {
        "model": command["model"],
        "messages": command["messages"],
        **command["parameters"],
        "extra_body": command["extra"],
        **more,
    }


def _verified(command: Command) -> Any:
    return ssl.create_default_context(cafile=command["authority"]) if command["authority"] else True


def sync(command: Command) -> dict[str, Any]:
    """The blocking client."""
    http = openai.DefaultHttpxClient(verify=_verified(command))
    with openai.OpenAI(**_options(command), http_client=http) as client:
        if not command["streams"]:
            return whole_of(client.chat.completions.create(**_body(command)))
        chunks = Chunks(command["leave_after"])
        with client.chat.completions.create(**_body(command)) as stream:
            for chunk in stream:
                if chunks.take(chunk):
                    break
        return chunks.seen()


async def _aio(command: Command) -> dict[str, Any]:
    http = openai.DefaultAsyncHttpxClient(verify=_verified(command))
    async with openai.AsyncOpenAI(**_options(command), http_client=http) as client:
        if not command["streams"]:
            return whole_of(await client.chat.completions.create(**_body(command)))
        chunks = Chunks(command["leave_after"])
        async with await client.chat.completions.create(**_body(command)) as stream:
            async for chunk in stream:
                if chunks.take(chunk):
                    break
        return chunks.seen()


def aio(command: Command) -> dict[str, Any]:
    """The client of asyncio."""
    return LOOP.run(_aio(command))


def parsed(command: Command) -> dict[str, Any]:
    """An answer by a JSON schema, which the package's `parse` makes of a pydantic model."""
    import pydantic

    class Colour(pydantic.BaseModel):
        name: str
        dark: bool

    with openai.OpenAI(**_options(command)) as client:
        answer = client.chat.completions.parse(**_body(command), response_format=Colour)
        found = answer.choices[0].message.parsed
        assert isinstance(found, Colour)
        return {"text": answer.choices[0].message.content, "parsed": found.model_dump()}


def turns(command: Command) -> dict[str, Any]:
    """A second turn with the message object of the first answer."""
    with openai.OpenAI(**_options(command)) as client:
        first = client.chat.completions.create(**_body(command)).choices[0].message
        return whole_of(client.chat.completions.create(**_body(asked_again(command, first))))


if __name__ == "__main__":
    serve({"sync": sync, "aio": aio, "parse": parsed, "turns": turns})
