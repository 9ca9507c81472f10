"""The stock clients of the OpenAI API, and how each is installed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.environments import environment
from tests.clients import stock
from tests.clients.openai_driver import OpenAiClient
from tests.clients.site import Site

NPM_VERSION: Final = "7.59.0"
LANGCHAIN_VERSION: Final = "1.7.4"
LITELLM_VERSION: Final = "1.110.2"


@dataclass(frozen=True)
class Kind:
    """What is known of a client before it runs. The ways are calls that its program knows by name."""

    whole: Sequence[str]
    """Ways to get a whole answer."""
    streamed: Sequence[str]
    """Ways to get a stream."""
    schema: str = ""
    """The way with a JSON schema; empty: it has none."""
    tools: str = ""
    """The way with tools; empty: it has none of its own."""
    keeps_reasons: bool = True
    """False: its exceptions have the text of an error, and lose `code` and `param`."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Requests of a way for one call that is refused with x-should-retry: false. 1 for all others."""


KINDS: Final = {
    "openai": Kind(("sync", "aio"), ("sync", "aio"), schema="parse"),
    "openai npm": Kind(("create",), ("create", "stream"), schema="parse"),
    "langchain": Kind(
        ("sync", "aio", "batch"), ("sync", "aio"), schema="parse", tools="tools", sent={"batch": 4}
    ),
    # Its Router has retries of its own, two by default, and does not know the header.
    "litellm": Kind(
        ("sync", "aio", "router"),
        ("sync", "aio", "router"),
        tools="tools",
        keeps_reasons=False,
        sent={"router": 3},
    ),
}
NAMES: Final = tuple(KINDS)


def command(name: str) -> Sequence[str]:
    """Return the command of the client `name`, one of NAMES, installed now if it is missing. Raises Unavailable."""
    if name == "openai npm":
        return stock.node("openai", NPM_VERSION, "openai_node.js")
    python, program = sys.executable, "openai_python"
    if name == "langchain":
        python = str(environment("langchain-openai", LANGCHAIN_VERSION) / "bin" / "python")
        program = "openai_langchain"
    elif name == "litellm":
        python, program = str(environment("litellm", LITELLM_VERSION) / "bin" / "python"), "openai_litellm"
    return (python, "-m", f"tests.clients.programs.{program}")


@asynccontextmanager
async def running(name: str, words: Sequence[str], site: Site, logs: Path) -> AsyncIterator[OpenAiClient]:
    """Start the client `name` by the command `words`, and end it."""
    # Node takes further authorities from a variable alone.
    trusted = {"NODE_EXTRA_CA_CERTS": site.certificates.files("client").authority}
    client = OpenAiClient(name, words, logs / f"client-{name.replace(' ', '-')}.log", trusted)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()
