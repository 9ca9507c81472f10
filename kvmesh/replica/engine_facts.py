"""The facts of a replica's engine: each boot of the engine has to have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvmesh.triton.capabilities import ModelFacts, ModelRefused, differences
from kvmesh.triton.errors import CallError

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Time from a failed read to the next one."""


class EngineFacts:
    """Facts that were read at the start of the process, and are read again at each boot of the engine.

    Caches, limits and links of the process stand on them, and leases and routers know them. So the process ends if another
    engine has taken the place of the first one. Its next start reads the new facts.
    """

    def __init__(self, facts: ModelFacts, read: Callable[[], Awaitable[ModelFacts]]) -> None:
        """`read` returns the facts of the engine. It raises ModelRefused, or CallError if the engine does not answer."""
        self.facts = facts
        self._read = read
        self._boot_id = ""
        self._changed = asyncio.Event()

    def on_engine(self, boot_id: str) -> None:
        """Take the boot id of the engine. Empty: unknown, ignored."""
        if boot_id and boot_id != self._boot_id:
            self._boot_id = boot_id
            self._changed.set()

    async def run(self) -> None:
        """Compare the facts of each boot until cancelled. Raises ModelRefused if they differ."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                found = await self._read()
            except CallError as error:
                log.info("the facts of the engine are read again: %s", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()
                continue
            if found != self.facts:
                text = differences(self.facts, found)
                raise ModelRefused(
                    f"The engine was started anew as another one; start this service anew: {text}."
                )
