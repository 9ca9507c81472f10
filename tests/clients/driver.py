"""A stock client in a process of its own, driven by JSON lines. All clients understand the same commands.

A command makes one or several equal calls with raw bytes, so no client needs generated code:

    {"id": 1, "channel": "a", "target": "127.0.0.1:50051", "tls": null, "path": "/package.Service/Method",
     "request": BASE64, "streams": true, "deadline_s": 5.0, "cancel_after": 0, "gzip": false,
     "metadata": [], "count": 1, "is_brief": false}

The client answers {"id": 1, "first": true} at the first message of any of the calls, and at their end {"id": 1,
"outcomes": [...]}, with the fields of `Outcome`. Commands with the same `channel` share it. "is_brief": true leaves the
messages out.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from kvmesh.child import bound_command
from kvmesh.config import ROOT
from tests.patience import wait_for

LINE_BYTES_MAX: Final = 64 << 20
CALLS_S_MAX: Final = 60.0
"""Longest time of a command without a deadline, in seconds of a quiet machine."""

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class Tls(msgspec.Struct, kw_only=True, frozen=True):
    """TLS of a channel: files (PEM), and the name that the server's certificate must have. Empty: no client certificate."""

    authority: str
    name: str
    certificate: str = ""
    key: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """The end of one call."""

    code: int
    details: str = ""
    messages: list[str] = []
    """Base64."""
    trailers: dict[str, str] = {}
    """Trailing metadata; values of "-bin" keys in base64."""
    message_count: int = 0
    gap_s: float = 0.0
    """Longest time between two messages."""

    @property
    def status(self) -> str:
        """Name of the code."""
        return _CODES.get(self.code, str(self.code))

    @property
    def bodies(self) -> list[bytes]:
        """The messages."""
        return [base64.b64decode(each) for each in self.messages]

    def __str__(self) -> str:
        return f"{self.status} {self.details[:120]!r} after {self.message_count} messages"


class Running:
    """Calls that a client makes now."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        """Set at the first message."""
        self.outcomes: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()

    async def end(self, within_s: float = CALLS_S_MAX) -> list[Outcome]:
        """Return the outcomes. Raises AssertionError if the calls do not end in time."""
        try:
            return await wait_for(asyncio.shield(self.outcomes), within_s)
        except TimeoutError:
            raise AssertionError(f"the calls did not end within {within_s:g} s") from None


class Client:
    """One client process. `command` starts it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, through: str = "") -> None:
        """`through`: the address of a proxy that the client calls in place of a frontend."""
        self.name = name
        self.through = through
        self._log = log
        self._command = command
        self._numbers = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process."""
        with self._log.open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                *bound_command(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                limit=LINE_BYTES_MAX,
            )
        self._reading = asyncio.create_task(self._read(), name=f"client:{self.name}")

    async def stop(self) -> None:
        """End the process."""
        if self._child is None or self._reading is None:
            return
        with suppress(ProcessLookupError):
            self._child.kill()
        await self._child.wait()
        await self._reading

    def begin(
        self,
        target: str,
        path: str,
        request: bytes,
        *,
        channel: str = "",
        tls: Tls | None = None,
        streams: bool = True,
        deadline_s: float | None = 60.0,
        cancel_after: int = 0,
        gzip: bool = False,
        metadata: Sequence[tuple[str, str]] = (),
        count: int = 1,
        is_brief: bool = False,
    ) -> Running:
        """Begin `count` calls at once. `cancel_after`: messages after which the client cancels; 0: it does not."""
        assert self._child is not None
        assert self._child.stdin is not None
        number, running = next(self._numbers), Running()
        self._running[number] = running
        command = {
            "id": number,
            "channel": channel or target,
            "target": self.through or target,
            "tls": tls,
            "path": path,
            "request": base64.b64encode(request).decode(),
            "streams": streams,
            "deadline_s": deadline_s,
            "cancel_after": cancel_after,
            "gzip": gzip,
            "metadata": metadata,
            "count": count,
            "is_brief": is_brief,
        }
        self._child.stdin.write(msgspec.json.encode(command) + b"\n")
        return running

    async def call(self, target: str, path: str, request: bytes, **options: Any) -> Outcome:
        """Make one call; see `begin`."""
        (outcome,) = await self.begin(target, path, request, **options).end()
        return outcome

    async def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        while line := await self._child.stdout.readline():
            answer = msgspec.json.decode(line)
            running = self._running[answer["id"]]
            if "outcomes" in answer:
                running.outcomes.set_result(msgspec.convert(answer["outcomes"], list[Outcome]))
                running.has_begun.set()
            else:
                running.has_begun.set()
        for running in self._running.values():
            if not running.outcomes.done():
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
                running.outcomes.set_exception(AssertionError(f"the client {self.name} ended:\n{tail}"))
                running.has_begun.set()
