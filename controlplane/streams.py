"""The open Watch streams of one control process, by receiver."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from controlplane.actions import Confirm, Send, Steer
from controlplane.outbox import ReceiverOutbox
from controlplane.warmup.actions import Order
from kvmesh.control.v1 import snapshot_pb2 as pb

STREAMS_MAX: Final = 4096
"""Open streams. A further one is refused."""

BEATS_AT_ONCE: Final = 64
"""Heartbeats that are sent before other events of the loop have their turn."""


@dataclass(eq=False)
class ReceiverStream:
    """One stream. Its writer waits on `news`."""

    process_id: str
    boot_id: str
    outbox: ReceiverOutbox = field(default_factory=ReceiverOutbox)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: bool = False
    """True if the stream ends after the next message."""

    def end(self, hint: pb.LeaderHint | None = None) -> None:
        """End the stream, after `hint` if there is one."""
        if hint is not None:
            self.outbox.lead(hint)
        self.is_ending = True
        self.news.set()


class ReceiverStreams:
    """See the module. A process has one stream: a new one ends the one before."""

    def __init__(self) -> None:
        self.cut_total = 0
        """Streams that were cut off, because the receiver took or sent nothing."""
        self._by_name: dict[str, ReceiverStream] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def is_full(self) -> bool:
        """True if no further stream may be opened."""
        return len(self._by_name) >= STREAMS_MAX

    def open(self, process_id: str, boot_id: str) -> ReceiverStream:
        """Return a new stream of the process."""
        former = self._by_name.pop(process_id, None)
        if former is not None:
            former.end()
        stream = self._by_name[process_id] = ReceiverStream(process_id, boot_id)
        return stream

    def close(self, stream: ReceiverStream) -> bool:
        """Forget a stream. Return False if a later stream of the process took its place."""
        if self._by_name.get(stream.process_id) is not stream:
            return False
        del self._by_name[stream.process_id]
        return True

    async def beat(self) -> None:
        """Send a heartbeat on each stream: what waits there, or an empty message."""
        for at, stream in enumerate(list(self._by_name.values()), start=1):
            stream.news.set()
            if at % BEATS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def send(self, action: Send) -> None:
        """Send a snapshot to one receiver, if its stream is open."""
        stream = self._find(action.process_id, action.boot_id)
        if stream is not None:
            stream.outbox.send(action)
            stream.news.set()

    def confirm(self, action: Confirm) -> None:
        """Confirm observations to one frontend, if its stream is open."""
        stream = self._find(action.process_id, action.boot_id)
        if stream is not None:
            stream.outbox.confirm(action)
            stream.news.set()

    def order(self, action: Order) -> None:
        """Tell a replica its state, if its stream is open."""
        stream = self._find(action.process_id, action.boot_id)
        if stream is not None:
            stream.outbox.order(action.order)
            stream.news.set()

    def steer(self, action: Steer) -> None:
        """Tell a frontend or a router its part in the traffic between regions, if its stream is open."""
        stream = self._find(action.process_id, action.boot_id)
        if stream is not None:
            stream.outbox.steer(action.traffic)
            stream.news.set()

    def end_all(self, hint: pb.LeaderHint) -> None:
        """End all streams: this process does not lead any more."""
        for stream in list(self._by_name.values()):
            stream.end(hint)

    def _find(self, process_id: str, boot_id: str) -> ReceiverStream | None:
        stream = self._by_name.get(process_id)
        return stream if stream is not None and stream.boot_id == boot_id and not stream.is_ending else None
