"""Whether a client still reads once its request has ended: what is left to write must go out, or its call is given up.

A shell: one timer per request, set at its end. Until then nobody waits for the client; behind it its place and its budget
would be held for as long as it likes.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.request import LiveRequest

TAIL_S: Final = 30.0
"""Longest time behind a request's end that one write may take. HTTP/2 asks for more in lumps of some 64 KB, however evenly
a client reads: who takes less than that in this time is cut."""


class SlowReaderTimeout:
    """Cancels the current task, which serves a request, and sets `is_timed_out` when the client does not read.

    The serving task notes each write that went out in `wrote_s`.
    """

    __slots__ = ("_clock", "_request", "_task", "_timer", "is_timed_out", "ready", "wrote_s")

    def __init__(self, clock: Clock) -> None:
        self.ready = asyncio.Event()
        """Set when there may be something to write, or the end came."""
        self.is_timed_out = False
        self.wrote_s = float("-inf")
        self._clock = clock
        self._request: LiveRequest | None = None
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None

    def on_ready(self) -> None:
        """Wake the writer."""
        self.ready.set()
        if self._request is not None and self._request.outcome is not None:
            self._start()

    def follow(self, request: LiveRequest) -> None:
        """Watch for the end of `request`; it may have come already."""
        self._request = request
        if request.outcome is not None:
            self._start()

    def close(self) -> None:
        """Cut nobody any more. Idempotent."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def has_timed_out(self) -> bool:
        """Return whether the cancellation that the task sees came from here, and from nobody else; it is taken back."""
        assert self._task is not None
        return self.is_timed_out and not self._task.uncancel()

    def _start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tail_s(), self._check)

    def _tail_s(self) -> float:
        """Return how long one write may take: a client that was cut because it did not read has had its time."""
        request = self._request
        is_slow_reader = (
            request is not None
            and request.outcome is not None
            and request.outcome.error is not None
            and request.outcome.error.reason == "SLOW_READER"
            and request.progress.writing_since_s is not None
        )
        return 0.0 if is_slow_reader else TAIL_S

    def _check(self) -> None:
        """Cut, or look again when the write that may be under way has had its time."""
        request, self._timer = self._request, None
        if request is None:
            return
        left_s = max(self.wrote_s, request.ended_s) + self._tail_s() - self._clock.now_s()
        if left_s > 0.001:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check)
            return
        self.is_timed_out = True
        assert self._task is not None
        self._task.cancel()
