"""A stock client of the OpenAI API in a process of its own, driven by JSON lines. All clients understand the same command.

    {"way": "sync", "base_url": "http://127.0.0.1:8080/v1", "api_key": "...", "authority": "", "model": "kvmesh",
     "messages": [{"role": "user", "content": "..."}], "next": "", "streams": true, "leave_after": 0,
     "parameters": {"max_tokens": 8}, "extra": {"deadline_ms": 500}}

`next` is the prompt of a second turn. `parameters` are fields that every client knows by name, `extra` those of the mesh.
The client answers with the fields of `Seen`, one line for each command, in order.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvmesh.child import bound_command
from kvmesh.config import ROOT
from tests.patience import wait_for

ANSWER_S_MAX: Final = 60.0
"""Longest time of a command, the import of the client's packages included."""


class Error(msgspec.Struct, kw_only=True):
    """An exception of the client. `classes`: its class and the bases, as package.Name."""

    classes: list[str]
    status: int | None = None
    code: str | int | None = None
    param: str | None = None
    message: str = ""

    def is_a(self, name: str) -> bool:
        """Return True if the class, or a base, has the name `name`."""
        return any(each.rpartition(".")[2] == name for each in self.classes)

    def __str__(self) -> str:
        return f"{self.classes[0]} {self.status} {self.code} {self.param}: {self.message[:300]}"


class Seen(msgspec.Struct, kw_only=True):
    """What the client saw of an answer."""

    text: str | None = None
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the output."""
    chunk_count: int = 0
    """Chunks with text."""
    parsed: Any = None
    """The value that the client made of an answer by a JSON schema."""
    error: Error | None = None


@dataclass(frozen=True)
class Server:
    """The HTTP port of a frontend in the eyes of a client. `authority`: a file (PEM); empty: no TLS."""

    base_url: str
    model: str
    api_key: str = "none"
    authority: str = ""


class OpenAiClient:
    """One client process. `command` starts it, with `environment` beside the variables of this process."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._environment = environment
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process."""
        with self._log.open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                *bound_command(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **self._environment},
            )

    async def stop(self) -> None:
        """End the process."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()

    async def ask(
        self,
        way: str,
        server: Server,
        prompt: str,
        *,
        streams: bool = False,
        leave_after: int = 0,
        next_prompt: str = "",
        parameters: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> Seen:
        """Send a prompt, and return what the client saw. `leave_after`: chunks with text after which it leaves.

        Raises AssertionError if the client ends, or does not answer in time.
        """
        assert self._child is not None and self._child.stdin is not None and self._child.stdout is not None
        command = {
            "way": way,
            "base_url": server.base_url,
            "api_key": server.api_key,
            "authority": server.authority,
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "next": next_prompt,
            "streams": streams,
            "leave_after": leave_after,
            "parameters": parameters,
            "extra": extra or {},
        }
        self._child.stdin.write(msgspec.json.encode(command) + b"\n")
        try:
            line = await wait_for(self._child.stdout.readline(), ANSWER_S_MAX)
        except TimeoutError:
            await self.stop()
            raise AssertionError(f"{self.name}, {way}: no answer within {ANSWER_S_MAX:g} s") from None
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise AssertionError(f"{self.name}, {way}: the client ended:\n{tail}")
        return msgspec.json.decode(line, type=Seen)
