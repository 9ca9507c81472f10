"""LiteLLM with an `openai/` model. It runs in an environment of its own. See tests/clients/openai_driver.py."""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its price list is not fetched

import litellm

from tests.clients.programs.openai_commands import Chunks, Command, Loop, asked_again, serve, whole_of

litellm.suppress_debug_info = True
litellm.telemetry = False

LOOP = Loop()


def _arguments(command: Command) -> dict[str, Any]:
    litellm.ssl_verify = command["authority"] or True
    more = {"stream": True, "stream_options": {"include_usage": True}} if command["streams"] else {}
    return {
        "model": f"openai/{command['model']}",
        "api_base": command["base_url"],
        "api_key": command["api_key"],
        "messages": command["messages"],
        **command["parameters"],
        **command["extra"],
        **more,
    }


def _taken(command: Command, stream: Any) -> dict[str, Any]:
    chunks = Chunks(command["leave_after"])
    for chunk in stream:
        if chunks.take(chunk):
            # The wrapper has no close of its own in a blocking call.
            stream.completion_stream.close()
            break
    return chunks.seen()


async def _taken_aio(command: Command, stream: Any) -> dict[str, Any]:
    chunks = Chunks(command["leave_after"])
    async with aclosing(stream):
        async for chunk in stream:
            if chunks.take(chunk):
                break
    return chunks.seen()


def sync(command: Command) -> dict[str, Any]:
    """`completion`."""
    answer = litellm.completion(**_arguments(command))
    return _taken(command, answer) if command["streams"] else whole_of(answer)


async def _aio(command: Command) -> dict[str, Any]:
    answer = await litellm.acompletion(**_arguments(command))
    return await _taken_aio(command, answer) if command["streams"] else whole_of(answer)


def aio(command: Command) -> dict[str, Any]:
    """`acompletion`."""
    return LOOP.run(_aio(command))


async def _router(command: Command) -> dict[str, Any]:
    arguments = _arguments(command)
    deployment = {name: arguments.pop(name) for name in ("model", "api_base", "api_key")}
    router = litellm.Router(model_list=[{"model_name": "mesh", "litellm_params": deployment}])
    answer = await router.acompletion(model="mesh", **arguments)
    return await _taken_aio(command, answer) if command["streams"] else whole_of(answer)


def router(command: Command) -> dict[str, Any]:
    """Its Router, which the LiteLLM proxy uses."""
    return LOOP.run(_router(command))


def tools(command: Command) -> dict[str, Any]:
    """Tools of a request. The mesh passes them to the template and returns text."""
    function = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    return sync({**command, "extra": {"tools": [{"type": "function", "function": function}]}})


def turns(command: Command) -> dict[str, Any]:
    """A second turn with the message object of the first answer."""
    first = litellm.completion(**_arguments(command)).choices[0].message
    return sync(asked_again(command, first))


if __name__ == "__main__":
    serve({"sync": sync, "aio": aio, "router": router, "tools": tools, "turns": turns})
