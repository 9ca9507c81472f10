"""Writes of a turn of the event loop: one callback writes the waiting output of all requests, without waking their tasks.

A request is in one of two modes. In task mode its serving task writes and waits for the transport. In direct mode that task
is asleep, and the callback writes by `Call.try_write`. A message that the transport does not take at once goes to the task,
and the request returns to task mode. INVARIANT: in direct mode no write is in flight, so messages keep their order.

No I/O here: the call, the scheduler of the callback and the clock are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Message = TypeVar("Message")
Taken = TypeVar("Taken", covariant=True)


class Source(Protocol[Taken]):
    """Output of one request, for its writer."""

    def on_ready(self) -> None:
        """Wake the serving task: there is work that only that task does."""
        ...

    def has_ended(self) -> bool:
        """True if the request ended. Its serving task then writes the rest, and ends the call."""
        ...

    def take(self) -> Taken | None:
        """Return the waiting output as one message, or None. The caller writes the message before it takes another."""
        ...

    def delivered(self, now_s: float) -> None:
        """Note that the transport took the message of the last `take`."""
        ...


class DirectWriter(Generic[Message]):
    """The writer of one request. It starts in task mode.

    The serving task alternates between `take_back`, which starts task mode, and `rest`, before it sleeps.
    """

    __slots__ = ("_fault", "_is_closed", "_left", "_may_rest", "_source", "_try_write", "_turns", "is_direct")

    def __init__(
        self, source: Source[Message], try_write: Callable[[Message], bool], turns: TurnWriter
    ) -> None:
        self.is_direct = False
        """True in direct mode: from `rest` until a write that fails, or until `take_back`."""
        self._source = source
        self._try_write = try_write
        self._turns = turns
        self._may_rest = False
        """True if the transport took the last message at once. A transport without `try_write` never does."""
        self._left: Message | None = None
        """A taken message that the serving task must write."""
        self._fault: Exception | None = None
        self._is_closed = False

    def try_write(self, message: Message) -> bool:
        """Write `message` at once, for the serving task. False: the task must `await` its write."""
        self._may_rest = self._try_write(message)
        return self._may_rest

    def rest(self) -> None:
        """Start direct mode if the transport offers it: the task is about to sleep until `Source.on_ready` wakes it."""
        self.is_direct = self._may_rest and not self._is_closed

    def take_back(self) -> Message | None:
        """Start task mode; return a message that must be written before all others. Raises an error of the callback."""
        self.is_direct = False
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        left, self._left = self._left, None
        return left

    def close(self) -> None:
        """Write nothing from now on. Idempotent."""
        self.is_direct, self._is_closed, self._left = False, True, None

    def on_ready(self) -> None:
        """Note that output waits, or that the request ended."""
        if self.is_direct and not self._source.has_ended():
            self._turns.add(self)
        else:
            self._source.on_ready()

    def write(self, now_s: float) -> None:
        """Write the waiting output in direct mode. Raises nothing: the serving task gets an error of this request."""
        if not self.is_direct:
            return
        try:
            message = self._source.take()
            if message is None:
                return
            if self._try_write(message):
                self._source.delivered(now_s)
                return
            self._left, self._may_rest = message, False
        except Exception as error:  # noqa: BLE001  # it ends this request, and no other one
            self._fault = error
        self.is_direct = False
        self._source.on_ready()


class TurnWriter:
    """The requests with output to write in this turn of the event loop.

    `call_soon` runs a callback once, later in the same turn or at the start of the next one.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], now_s: Callable[[], float]) -> None:
        self._call_soon = call_soon
        self._now_s = now_s
        self._waiting: dict[DirectWriter[Any], None] = {}

    def add(self, writer: DirectWriter[Message]) -> None:
        """Write the output of `writer` in this turn. A writer that is added twice is run once."""
        if not self._waiting:
            self._call_soon(self._write)
        self._waiting[writer] = None

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, {}
        now_s = self._now_s()
        for writer in waiting:
            writer.write(now_s)
