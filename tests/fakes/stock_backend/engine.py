"""The engine of the impersonation: the reference engine, and requests that wait for a handoff that never comes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from engines.contract import errors
from engines.contract.outputs import LoadReport, RequestOutput
from engines.reference.engine import ReferenceEngine
from engines.reference.scheduler import ScheduledChunk


class StockEngine(ReferenceEngine):
    """See the module. `hang` is thread-safe."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hanging: set[int] = set()
        self._hanging_lock = threading.Lock()
        self.last_iteration: LoadReport | None = None
        """The load in the last step, its requests included. Set by the engine thread."""

    def hang(self, key: int) -> None:
        """Keep a request, whose stream is open in the output queue, until its client cancels."""
        with self._hanging_lock:
            self._hanging.add(key)

    def cancel(self, key: int) -> None:
        """See contract.engine."""
        with self._hanging_lock:
            is_hanging = key in self._hanging
            self._hanging.discard(key)
        if is_hanging:
            self.output_queue.put([(key, RequestOutput(is_final=True))])
        else:
            super().cancel(key)

    def _step(self, plan: list[ScheduledChunk]) -> None:
        load = self.core.load()
        super()._step(plan)
        self.last_iteration = replace(load, steps_total=self.core.counters.steps)

    def close(self) -> None:
        """See contract.engine."""
        with self._hanging_lock:
            hanging, self._hanging = self._hanging, set()
        ends = [(key, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True)) for key in hanging]
        self.output_queue.put(ends)
        super().close()
