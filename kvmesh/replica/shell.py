"""The I/O around a replica's core: timer, engine state and graceful shutdown. Connects Attach and the engine to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import Session
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.replica.life_view import LifeView
from kvmesh.timer import Timer
from kvmesh.triton.port import EngineLoad, EnginePort, EngineSink

log = logging.getLogger(__name__)


class ReplicaSink(EngineSink, Protocol):
    """The engine sink of a core, with the last state of the engine."""

    is_ready: bool

    @property
    def load(self) -> EngineLoad | None: ...


class ReplicaCore(Protocol):
    """The core of a prefill or decode replica. Synchronous."""

    @property
    def sink(self) -> ReplicaSink: ...

    def connect(self, engine: EnginePort) -> None: ...

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session: ...

    def next_wake_s(self) -> float | None: ...

    def on_timer(self, now_s: float) -> None: ...

    def drain(self) -> None: ...

    def undrain(self) -> None: ...

    def set_cordoned(self, is_cordoned: bool) -> None: ...

    def set_life(self, life: LifeView) -> None: ...

    def set_cached_blocks(self, engine_boot_id: str, blocks: int) -> None: ...

    def cached_block_count(self) -> int: ...

    def live_request_count(self) -> int: ...

    def longest_wait_us(self, now_s: float) -> int: ...

    def is_idle(self) -> bool: ...


class ReplicaShell:
    """An Attachable. `close` it before the loop ends."""

    def __init__(self, core: ReplicaCore, clock: Clock, on_engine: Callable[[str], None]) -> None:
        """`on_engine` gets the boot id of the engine after each change of its state, before a load report can tell it."""
        self._core = core
        self._on_engine = on_engine
        self._timer = Timer(core, clock, _log_bug)
        self._reported: tuple[bool, str] = (False, "")
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_draining = False

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session:
        """See Attachable."""
        return self._core.open_session(peer, outbox, now_s)

    def after_event(self) -> None:
        """See Attachable. Also called after each event of the engine."""
        state = self._engine_state()
        if state != self._reported:
            self._on_engine(state[1])  # first: a report of the new engine must not say that it is in service
            self._changed.set()
        self._timer.update()
        if self._is_draining and self._core.is_idle():
            self._idle.set()

    async def report_engine_state(self, report: Callable[[bool, str], Awaitable[None]]) -> None:
        """Call `report(is ready, boot id)` after each change, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._reported = self._engine_state()
            await report(*self._reported)

    async def drain(self) -> None:
        """Refuse new requests, and return when no request is held. The caller cancels at the end of the drain time."""
        self._core.drain()
        self._is_draining = True
        self.after_event()
        await self._idle.wait()

    def begin_drain(self) -> None:
        """Refuse new requests until `end_drain`."""
        self._core.drain()
        self.after_event()

    def end_drain(self) -> None:
        """Take new requests again."""
        self._core.undrain()
        self.after_event()

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to routers whether the process may get new requests."""
        self._core.set_cordoned(is_cordoned)
        self.after_event()

    def set_life(self, life: LifeView) -> None:
        """Report to routers whether the replica is held or quarantined."""
        self._core.set_life(life)
        self._timer.update()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.close()

    def _engine_state(self) -> tuple[bool, str]:
        sink = self._core.sink
        return sink.is_ready, sink.load.boot_id if sink.load else ""


def _log_bug(error: Exception) -> None:
    log.error("bug in the timer of the replica", exc_info=error)
