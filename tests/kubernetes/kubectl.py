"""Calls of kubectl: one at a time, and a watch of objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 60.0
LINE_BYTES_MAX: Final = 1 << 20


class KubectlError(Exception):
    """A call of kubectl failed. The text is one sentence."""


class TooManyRequests(KubectlError):
    """The API refused an eviction: the disruption budget does not allow it now."""


class AlreadyExists(KubectlError):
    """The API refused to create an object: there is one of its name."""


_REASONS: Final = {"TooManyRequests": TooManyRequests, "AlreadyExists": AlreadyExists}


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program, a cluster and a namespace."""

    program: str
    kubeconfig: str
    """File of kubectl; empty: the one that kubectl finds."""
    context: str
    """Context of that file; empty: the current one at each call."""
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
            kind = next((_REASONS[reason] for reason in _REASONS if reason in told), KubectlError)
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
        chosen = (("--kubeconfig", self.kubeconfig), ("--context", self.context))
        options = [word for option, value in chosen if value for word in (option, value)]
        return [self.program, *options, "--namespace", self.namespace, *words]


async def in_context(program: str, kubeconfig: str, context: str, namespace: str) -> Kubectl:
    """Return calls that stay with `context`, or with the one that is current now. Raises KubectlError without one."""
    if not context:
        context = (await Kubectl(program, kubeconfig, "", namespace).run("config", "current-context")).strip()
    return Kubectl(program, kubeconfig, context, namespace)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill a process that still runs, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
