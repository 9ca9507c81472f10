"""Asks a child process whether any output can meet a guide, with bounded time and memory (see `guide_worker`).

Answers are remembered: programs send the same schema again and again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from kvmesh.attach.v1 import attach_pb2
from kvmesh.errors import Violation, invalid
from services.frontend.requests.sampling import Guide
from services.frontend.surface.guide_limits import MEMORY_BYTES_MAX, SECONDS_MAX

KNOWN_MAX: Final = 1024
"""Guides whose answers are remembered."""
WALL_S: Final = 20.0
"""Last resort on a machine that gives the child no processor time."""
_ROOT: Final = Path(__file__).resolve().parents[3]
_FORMS: Final = {
    attach_pb2.Guide.KIND_JSON_SCHEMA: "json_schema",
    attach_pb2.Guide.KIND_REGEX: "regex",
}
_ALLOWED: Final = {
    "json_schema": "a JSON schema of supported keywords that can be met",
    "regex": "a regular expression",
}


class GuideCheck:
    """Checks one guide after the other. The child starts with the first one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._child: Process | None = None
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, guide: Guide | None) -> None:
        """Raise MeshError if no output can meet `guide`."""
        kind = None if guide is None else _FORMS.get(guide.kind)
        if guide is None or kind is None:
            return
        fault = await self.fault(kind, guide.text)
        if fault:
            raise invalid(
                "FIELD_OUT_OF_RANGE",
                [Violation(f"sampling.guide.{kind}", f"refused: {in_a_line(fault)}", _ALLOWED[kind])],
            )

    async def fault(self, kind: str, text: str) -> str:
        """Return why no output can meet the guide of a kind, or an empty text."""
        key = kind.encode() + xxhash.xxh3_128_digest(text.encode())
        known = self._faults.get(key)
        if known is None:
            async with self._lock:
                known = await self._asked(kind, text)
            if known is None:
                return (
                    f"it was not read within {WALL_S:g} s"  # of a machine that stands still, not of the guide
                )
            self._faults[key] = known
            if len(self._faults) > KNOWN_MAX:
                self._faults.popitem(last=False)
        else:
            self._faults.move_to_end(key)
        return known

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _asked(self, kind: str, text: str) -> str | None:
        """Return the child's answer, or what its death says of the guide. None: there was no time for an answer.

        An older child may have died by itself. A guide is too much only if a new child dies of it.
        """
        line = json.dumps([kind, text]).encode() + b"\n"
        try:
            async with asyncio.timeout(WALL_S):
                answer = b"" if self._child is None else await self._exchange(self._child, line)
                if not answer:
                    await self.close()
                    answer = await self._exchange(await self._started(), line)
        except TimeoutError:
            await self.close()
            return None
        except asyncio.CancelledError:
            await self.close()  # the next caller shall not wait for this guide
            raise
        if answer:
            return str(json.loads(answer))
        await self.close()
        return f"it takes more than {SECONDS_MAX:g} s of CPU time or {MEMORY_BYTES_MAX >> 20} MB of memory"

    async def _started(self) -> Process:
        """Return a new child. Raises RuntimeError if it does not start."""
        child = self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.frontend.surface.guide_worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd=_ROOT,
            env={"PYTHONPATH": str(_ROOT)},
        )
        assert child.stdout is not None
        if not await child.stdout.readline():
            raise RuntimeError("the process that reads guides does not start")
        return child

    @staticmethod
    async def _exchange(child: Process, line: bytes) -> bytes:
        """Return the child's answer to `line`; empty if it has died."""
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            child.stdin.write(line)
            await child.stdin.drain()
        return await child.stdout.readline()


def in_a_line(fault: str) -> str:
    """Return the sentence of a fault of llguidance, which may draw its place with a caret in further lines."""
    _, is_drawn, last = fault.rpartition("error: ")
    return " ".join((last.splitlines()[0] if is_drawn and last else fault).split())[:200]
