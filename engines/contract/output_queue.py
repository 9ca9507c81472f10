"""The output queue: one thread sends the outputs of all requests, so that a step never waits for a client.

Outputs of one request that wait in the queue are merged into one message. The backlog is therefore bounded by the
number of open requests and their output lengths.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engines.contract.outputs import RequestOutput
from engines.contract.step_streams import SlotStream, StepStream

_log = logging.getLogger(__name__)

REPEAT_S = 1.0  # an open stream that is cancelled is told to the engine again after this time


class ResponseStream(Protocol):
    """The stream of responses to one request."""

    is_streaming: bool

    def send(self, output: RequestOutput) -> None:
        """Send one message; the last message is final. Called by the output queue's thread only."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled. Called by the cancellation poller's thread only."""


@dataclass(slots=True)
class OutputQueue:
    """Open streams by key, and the outputs that wait to be sent. Thread-safe.

    The outputs of all slots of a step stream that are ready are sent together.
    """

    _open_streams: dict[int, ResponseStream] = field(default_factory=dict)
    _pending: dict[int, RequestOutput] = field(default_factory=dict)
    _ready: deque[int | StepStream] = field(default_factory=deque)
    _ready_slots: dict[StepStream, list[int]] = field(default_factory=dict)
    """Ready keys of each step stream in `_ready`."""
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the sending thread."""
        self._thread = threading.Thread(target=self._run, name="output-queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the waiting outputs and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def open(self, key: int, stream: ResponseStream) -> None:
        """Open the stream of a request; called before the first `put` for its key."""
        with self._changed:
            self._open_streams[key] = stream

    def open_streams(self) -> list[tuple[int, ResponseStream]]:
        """Return the streams without a final message yet."""
        with self._changed:
            return list(self._open_streams.items())

    def put(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """Queue outputs, oldest first. The queue owns the outputs from here on; unknown keys are ignored."""
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
                    self._add_ready(key, stream)
            self._changed.notify()

    def _add_ready(self, key: int, stream: ResponseStream) -> None:
        if not isinstance(stream, SlotStream):
            self._ready.append(key)
            return
        keys = self._ready_slots.get(stream.stream)
        if keys is None:
            self._ready_slots[stream.stream] = [key]
            self._ready.append(stream.stream)
        else:
            keys.append(key)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready and not self._is_closed:
                    self._changed.wait()
                if not self._ready:
                    return
                ready = self._ready.popleft()
                keys = self._ready_slots.pop(ready) if isinstance(ready, StepStream) else [ready]
                outputs = [(self._open_streams[key], self._pending.pop(key)) for key in keys]
                for key, (_, output) in zip(keys, outputs, strict=True):
                    if output.is_final:
                        del self._open_streams[key]
            try:
                if isinstance(ready, StepStream):
                    ready.send_step(outputs)  # type: ignore[arg-type]  # its streams are its slots
                else:
                    outputs[0][0].send(outputs[0][1])
            except Exception:  # noqa: BLE001  # an error of one stream must not end the others
                _log.exception("sending the output of a request failed")


@dataclass(slots=True)
class CancellationPoller:
    """Polls every open stream once per period for cancellation. Each poll takes a call into Triton."""

    open_streams: Callable[[], list[tuple[int, ResponseStream]]]
    cancel: Callable[[int], None]
    period_s: float
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the polling thread."""
        self._thread = threading.Thread(target=self._run, name="cancellation-poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        told: dict[int, float] = {}
        next_s = time.monotonic()
        while not self._closed.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + self.period_s, time.monotonic())
            open_streams, now_s = self.open_streams(), time.monotonic()
            told = {key: told[key] for key, _ in open_streams if key in told}
            for key, stream in open_streams:
                # The engine may not have known the request at the first time.
                is_due = key not in told or now_s - told[key] >= REPEAT_S
                if is_due and stream.is_cancelled():
                    told[key] = now_s
                    self.cancel(key)
