"""Turns of the event loop for the input of connections, so that floods on many of them delay no other.

All connections of a server take TURN_S of a turn of the event loop at most, whatever their number. Beyond that they wait in
two lines, as the new and old flows of FQ-CoDel (RFC 8290): a connection without waiting input joins the first line with its
next input, for one slice. The rest of its input waits in the second line, slice by slice. A new connection begins in the
second line: clients that connect again and again do not delay those that are served.

Synchronous; the clock and the scheduler of the callback are arguments.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kvmesh.clock import Clock

TURN_S: Final = 0.002
"""Longest time in seconds that the input of all connections takes of a turn of the event loop, and two slices more."""

READ_BYTES: Final = 16_384
"""Largest read of a socket, and so the most input of a connection that waits. uvloop itself reads up to 256 KB at once."""


class Input(Protocol):
    """Input of one connection that waits. `is_new`: True until InputTurns has taken all of it once."""

    is_new: bool

    def take_slice(self) -> bool:
        """Take one slice. Return True if more waits."""
        ...

    def on_taken(self) -> None:
        """Note that nothing waits, after `ready` returned False."""
        ...


class InputTurns:
    """The connections whose input waits for its turn. INVARIANT: while one waits, a turn is scheduled."""

    def __init__(self, clock: Clock, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`clock` moves within a turn, as the time of uvloop does not. `call_soon` runs a callback in the next turn."""
        self.buffer = memoryview(bytearray(READ_BYTES))
        """The shared buffer of all reads. Each read is copied out of it at once."""
        self._now_s = clock.now_s
        self._call_soon = call_soon
        self._first: deque[Input] = deque()
        self._second: deque[Input] = deque()
        self._left_s = TURN_S
        """Time that is left of this turn. Turns that take little of it share it: a callback for each costs more."""
        self._is_due = False

    def ready(self, source: Input) -> bool:
        """Take the input of `source` as far as this turn allows. Return False if the rest waits in a line.

        Call it for a source that does not wait.
        """
        if not self._first and not self._second:
            while self._left_s > 0:
                if not self._take(source):
                    return True
        (self._second if source.is_new else self._first).append(source)
        self._schedule()
        return False

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._serve)

    def _take(self, source: Input) -> bool:
        """Take one slice. Return True if more waits."""
        begin_s = self._now_s()
        has_more = source.take_slice()
        self._left_s -= self._now_s() - begin_s
        if self._left_s < TURN_S / 2:
            self._schedule()
        if not has_more:
            source.is_new = False
        return has_more

    def _serve(self) -> None:
        """Begin a turn, and serve the lines."""
        self._is_due, self._left_s = False, TURN_S
        try:
            while self._first and self._left_s > 0:
                self._advance(self._first)
            if self._second:  # one slice in any case
                self._advance(self._second)
            while self._second and self._left_s > 0:
                self._advance(self._second)
        finally:  # a bug met by one connection does not hold the others
            if self._first or self._second:
                self._schedule()

    def _advance(self, line: deque[Input]) -> None:
        source = line.popleft()
        if self._take(source):
            self._second.append(source)
        else:
            source.on_taken()


def call_soon(callback: Callable[[], None]) -> None:
    """Run `callback` in the next turn of the running event loop."""
    asyncio.get_running_loop().call_soon(callback)
