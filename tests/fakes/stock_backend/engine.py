"""The engine of the impersonation: the reference engine, and requests that wait for a handoff that never comes."""

from __future__ import annotations

import threading
from typing import Any

from engines.contract import errors
from engines.contract.outputs import RequestOutput
from engines.reference.engine import ReferenceEngine


class StockEngine(ReferenceEngine):
    """See the module. `hang` is thread-safe."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hanging: set[int] = set()
        self._hanging_lock = threading.Lock()

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

    def close(self) -> None:
        """See contract.engine."""
        with self._hanging_lock:
            hanging, self._hanging = self._hanging, set()
        ends = [(key, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True)) for key in hanging]
        self.output_queue.put(ends)
        super().close()
