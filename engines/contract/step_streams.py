"""Step streams: the outputs of many requests of one client as frames, in the responses of one long-lived request.

A client names its step stream, and may renew it: the next request with the same name takes over, and the former one ends.
The frames of all requests of a step stream have consecutive numbers, so a client can order those of two requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engines.contract import errors, step_frames
from engines.contract.errors import EngineError
from engines.contract.outputs import RequestOutput
from engines.contract.step_frames import ROWS_MAX, SlotProgress


class FrameSender(Protocol):
    """The responses of one step-stream request."""

    def send(self, frame: bytes, *, is_last: bool) -> None:
        """Send one frame. No frame follows the last one."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request. Called by the cancellation poller's thread only."""


@dataclass(slots=True, eq=False)
class SlotStream:
    """The outputs of one slot: a ResponseStream that is sent with the others of its step stream."""

    key: int
    stream: StepStream
    progress: SlotProgress
    is_streaming: bool = True
    was_cancelled: bool = False

    def send(self, output: RequestOutput) -> None:
        """Send a frame for this slot alone."""
        self.stream.send_step([(self, output)])

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the slot, or left."""
        return self.was_cancelled or self.stream.is_over


@dataclass(slots=True, eq=False)
class StepStream:
    """The slots of one client. Thread-safe. `key`: its number among the engine's requests.

    INVARIANT: a slot is open from `open_slot` until its final output. The numbers of frames have no gap.
    """

    key: int
    is_over: bool = False
    _sender: FrameSender | None = None
    _number: int = 0
    _slots: dict[int, SlotStream] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, sender: FrameSender) -> None:
        """Send by `sender` from now on, and end the former request. Raises EngineError after the stream's end."""
        with self._lock:
            if self.is_over:
                raise EngineError(errors.STEP_STREAM_UNKNOWN)
            if self._sender is not None:
                self._send_frame([], is_last=True)
            self._sender = sender

    def open_slot(self, slot: int, stream: SlotStream) -> None:
        """Open a slot. Raises EngineError for an open one, and if ROWS_MAX are open."""
        with self._lock:
            if self.is_over:
                raise EngineError(errors.STEP_STREAM_UNKNOWN)
            if slot in self._slots or len(self._slots) >= ROWS_MAX:
                allowed = f"a slot that is not open, and at most {ROWS_MAX} open slots"
                raise EngineError(errors.BAD_VALUE.format(field="step_slot", value=slot, allowed=allowed))
            self._slots[slot] = stream

    def cancel(self, slots: list[int]) -> list[int]:
        """Mark open slots as cancelled, and return their keys. Unknown slots are ignored."""
        with self._lock:
            found = [self._slots[slot] for slot in slots if slot in self._slots]
            for one in found:
                one.was_cancelled = True
            return [one.key for one in found]

    def send_step(self, outputs: list[tuple[SlotStream, RequestOutput]]) -> None:
        """Send one frame with these outputs. After the stream's end they are dropped."""
        with self._lock:
            for one, output in outputs:
                if output.is_final:
                    self._slots.pop(one.progress.slot, None)
            if not self.is_over:
                self._send_frame([(one.progress, output) for one, output in outputs], is_last=False)

    def is_cancelled(self) -> bool:
        """Return whether the client has left."""
        sender = self._sender
        return sender is not None and sender.is_cancelled()

    def end(self) -> list[int]:
        """End the stream with its last frame, and return the keys of the open slots. Idempotent."""
        with self._lock:
            if not self.is_over:
                if self._sender is not None:
                    self._send_frame([], is_last=True)
                self.is_over = True
            return [one.key for one in self._slots.values()]

    def _send_frame(self, outputs: list[tuple[SlotProgress, RequestOutput]], *, is_last: bool) -> None:
        assert self._sender is not None, "a stream is attached when it is made"
        self._number += 1
        self._sender.send(step_frames.encode(self._number, outputs, is_last=is_last), is_last=is_last)


@dataclass(slots=True)
class StepStreams:
    """The step streams of all clients, by name. Thread-safe."""

    _streams: dict[str, StepStream] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, name: str, sender: FrameSender, next_key: Callable[[], int]) -> None:
        """Begin the step stream `name`, or renew it."""
        with self._lock:
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = StepStream(next_key())
        stream.attach(sender)

    def find(self, name: str) -> StepStream:
        """Return a stream. Raises EngineError for an unknown one."""
        with self._lock:
            stream = self._streams.get(name)
        if stream is None:
            raise EngineError(errors.STEP_STREAM_UNKNOWN)
        return stream

    def live(self) -> list[tuple[int, StepStream]]:
        """Return all streams by their keys."""
        with self._lock:
            return [(one.key, one) for one in self._streams.values()]

    def end(self, key: int) -> list[int]:
        """End the stream with this key, and return the keys of its open slots. Unknown keys are ignored."""
        with self._lock:
            names = [name for name, one in self._streams.items() if one.key == key]
            found = [self._streams.pop(name) for name in names]
        return [slot_key for one in found for slot_key in one.end()]

    def close(self) -> None:
        """End all streams."""
        for key, _ in self.live():
            self.end(key)
