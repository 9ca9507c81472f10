"""Calls of kubectl: one at a time, and a watch of objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 60.0
LINE_BYTES_MAX: Final = 1 << 20


class KubectlError(Exception):
    """A call of kubectl failed. The text is one sentence."""


class TooManyRequests(KubectlError):
    """The API refused an eviction: the disruption budget does not allow it now."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program with the options that choose a cluster, and a namespace."""

    program: str
    options: Sequence[str]
    namespace: str

    async def run(self, *words: str, text: str = "", timeout_s: float = TIMEOUT_S) -> str:
        """Return the output of one call; `text` is its input. Raises KubectlError."""
        process = await asyncio.create_subprocess_exec(
            *self._command(*words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(text.encode())
        except TimeoutError as error:
            raise KubectlError(f"kubectl {' '.join(words)} did not end within {timeout_s:.0f} s.") from error
        finally:
            await _ended(process)
        if process.returncode:
            told = " ".join(err.decode(errors="replace").split())
            kind = TooManyRequests if "TooManyRequests" in told else KubectlError
            raise kind(f"kubectl {' '.join(words)}: {told.rstrip('.?')}.")
        return out.decode()

    async def read(self, *words: str) -> Any:
        """Return the JSON of `kubectl get`. Raises KubectlError."""
        return json.loads(await self.run("get", *words, "--output", "json"))

    @asynccontextmanager
    async def events(self, kind: str) -> AsyncIterator[AsyncIterator[Any]]:
        """Watch the objects of a kind: present ones first, then each change, as {"type": ..., "object": ...} in one line.

        The iterator ends when the watch does.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command("get", kind, "--watch", "--output-watch-events", "--output", "json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES_MAX,
        )
        assert process.stdout is not None
        try:
            yield (json.loads(line) async for line in process.stdout)
        finally:
            await _ended(process)

    def _command(self, *words: str) -> list[str]:
        return [self.program, *self.options, "--namespace", self.namespace, *words]


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill a process that still runs, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
