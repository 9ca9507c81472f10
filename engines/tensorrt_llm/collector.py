"""Collects the outputs of all requests that became ready in one turn of the event loop.

TensorRT-LLM wakes all requests of an iteration in one callback (utils.py@03dd9bb8, _SyncQueue.notify_many). Their tasks run
in the same turn, before a callback that is scheduled during it. So the outputs of an iteration leave in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engines.contract.outputs import RequestOutput


@dataclass(slots=True)
class StepCollector:
    """Gathers outputs and hands them to `put`, once a turn. Used in the thread of `loop` only."""

    loop: asyncio.AbstractEventLoop
    put: Callable[[list[tuple[int, RequestOutput]]], None]
    _outputs: list[tuple[int, RequestOutput]] = field(default_factory=list)

    def add(self, key: int, output: RequestOutput) -> None:
        """Hand `output` over after the tasks that are ready in this turn."""
        if not self._outputs:
            self.loop.call_soon(self.flush)
        self._outputs.append((key, output))

    def flush(self) -> None:
        """Hand over what was gathered."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self.put(outputs)
