"""Answers on their way out: one thread sends them, so that a step never waits for a client.

What piles up for one request while others are being sent becomes one message, so the backlog is bounded by the
live requests and their output lengths.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engines.reference.sequence import RequestOutput

_log = logging.getLogger(__name__)


class ResponseStream(Protocol):
    """The far end of one request."""

    is_streaming: bool

    def send(self, output: RequestOutput) -> None:
        """Send one message; the last one is final. Called by the outbox's thread only."""

    def is_cancelled(self) -> bool:
        """Whether the client is gone. Called by the watch's thread only."""


@dataclass(slots=True)
class OutputQueue:
    """Open replies by key, and what is still to be sent to each."""

    _open_streams: dict[int, ResponseStream] = field(default_factory=dict)
    _pending: dict[int, RequestOutput] = field(default_factory=dict)
    _ready: deque[int] = field(default_factory=deque)
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the sending thread."""
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is there and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def open(self, key: int, stream: ResponseStream) -> None:
        """Register a request before anything is posted for it."""
        with self._changed:
            self._open_streams[key] = stream

    def open_streams(self) -> list[tuple[int, ResponseStream]]:
        """Requests whose final part has not been sent yet."""
        with self._changed:
            return list(self._open_streams.items())

    def put(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """Queue parts, oldest first. The parts belong to the outbox from here on."""
        with self._changed:
            for key, output in outputs:
                stream = self._open_streams.get(key)
                if stream is None:
                    continue
                known = self._pending.get(key)
                if known is None:
                    self._pending[key] = output
                else:
                    known.merge(output)
                was_ready = known is not None and stream.is_streaming
                if not was_ready and (stream.is_streaming or output.is_final):
                    self._ready.append(key)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready and not self._is_closed:
                    self._changed.wait()
                if not self._ready:
                    return
                key = self._ready.popleft()
                output = self._pending.pop(key)
                stream = self._open_streams.pop(key) if output.is_final else self._open_streams[key]
            try:
                stream.send(output)
            except Exception:  # noqa: BLE001  # one client's answer must not end everybody's
                _log.exception("sending failed")


@dataclass(slots=True)
class CancellationPoller:
    """Asks every live request, one round per period, whether its client is gone (a question costs a trip to
    Triton).
    """

    open_streams: Callable[[], list[tuple[int, ResponseStream]]]
    cancel: Callable[[int], None]
    period_s: float
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the watching thread."""
        self._thread = threading.Thread(target=self._run, name="cancel-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        told: set[int] = set()
        next_s = time.monotonic()
        while not self._closed.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + self.period_s, time.monotonic())
            open_streams = self.open_streams()
            told &= {key for key, _ in open_streams}
            for key, stream in open_streams:
                if key not in told and stream.is_cancelled():
                    told.add(key)
                    self.cancel(key)
