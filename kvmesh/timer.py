"""Calls a synchronous core when it asked to be called: the only timer a service's core needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvmesh.clock import Clock


class TimedCore(Protocol):
    """A core that wants to be called at a time."""

    def next_wake_s(self) -> float | None:
        """Return when `on_timer` should be called next, or None."""
        ...

    def on_timer(self, now_s: float) -> None:
        """Do what is due."""
        ...


class Timer:
    """Keeps one loop timer at the core's next wake time. Owned by the service; `close` before the loop ends.

    Call `update` after every event that went into the core; it costs a comparison unless the wake time came nearer.
    """

    def __init__(self, core: TimedCore, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self._core = core
        self._clock = clock
        self._on_error = on_error
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = float("inf")

    def update(self) -> None:
        """Set the timer anew if the core wants to be called earlier than it is set to."""
        at_s = self._core.next_wake_s()
        if at_s is None or at_s >= self._at_s:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_s = at_s
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        """Stop calling the core."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._at_s = float("inf")

    def _fire(self) -> None:
        self._handle = None
        self._at_s = float("inf")
        try:
            self._core.on_timer(self._clock.now_s())
        except Exception as error:  # noqa: BLE001  # a bug must not stop the timer of all other requests
            self._on_error(error)
        self.update()
