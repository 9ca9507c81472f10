"""Slow-reader timeout, the bound of backpressure after a request's end: unread output ends in cancellation.

One timer per request, set at the request's end. Before the end, decode ends the stream of a slow reader
(`decode.slow_reader_s`). After the end, a client that does not read would hold its admission slot and its reservation
without limit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.request import LiveRequest

TAIL_S: Final = 30.0
"""Longest time of one write after a request's end.

HTTP/2 grants windows in steps of some 64 KB, however evenly a client reads. A client that reads less than one step in this
time is cut.
"""


class SlowReaderTimeout:
    """Cancels the current task, which serves a request, and sets `is_timed_out`, if the client does not read.

    The serving task sets `wrote_s` after each write.
    """

    __slots__ = ("_clock", "_request", "_task", "_timer", "is_timed_out", "ready", "wrote_s")

    def __init__(self, clock: Clock) -> None:
        self.ready = asyncio.Event()
        """Set when output may wait to be written, or the request ended."""
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
        """Watch `request`, which may have ended already."""
        self._request = request
        if request.outcome is not None:
            self._start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def has_timed_out(self) -> bool:
        """Return True if only this timeout cancelled the task; take the cancellation back in that case."""
        assert self._task is not None
        return self.is_timed_out and not self._task.uncancel()

    def _start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tail_s(), self._check)

    def _tail_s(self) -> float:
        """Return the longest time of one write: 0 for a client that was cut already because it did not read."""
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
        """Cut the client, or check again when the time of the current write is over."""
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
