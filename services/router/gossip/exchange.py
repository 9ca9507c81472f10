"""The gossip protocol of one router: chooses the next entry to write, and applies the entries that are read. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from math import inf
from typing import Final

from services.router.gossip import messages
from services.router.gossip.coalescing_window import CoalescingWindow
from services.router.gossip.messages import MESSAGES_MAX, Entry, Message
from services.router.gossip.open_dispatches import OpenDispatches
from services.router.gossip.peer_routers import ALL_IDS, PeerRouters
from services.router.gossip.propagation_delay import PropagationDelay
from services.router.placement.policy import DISPATCH_LIFE_S, Dispatched, DispatchEvent, Finished, Started

WAITING_MAX: Final = 8 * MESSAGES_MAX
"""Messages that wait to be written. The oldest are dropped beyond it."""

ENTRY_MESSAGES_MAX: Final = MESSAGES_MAX // 4
"""Messages in one entry. An entry is encoded and decoded without a yield, in some milliseconds."""

HASHES_MAX: Final = 8192
"""Block hashes in one entry, unless a single message has more: 64 kB."""


class Exchange:
    """`publish` takes this router's events, `next_entry` returns the entry to write, and `applying` takes the entries read.

    Without peer routers, only answers to a starting router are written.
    """

    def __init__(self, router: str, boot_id: str, peer_routers: PeerRouters) -> None:
        self.peer_routers = peer_routers
        self.open = OpenDispatches()
        self.propagation_delay = PropagationDelay()
        self.dropped_total = 0
        """Dispatches, starts and finishes that were not written."""
        self.is_reading = False
        """True while the stream is read, so that an answer to a repair request would arrive."""
        self._router = router
        self._boot_id = boot_id
        self._waiting: deque[Message] = deque()
        self._window = CoalescingWindow()
        """Of the events in `_waiting`."""
        self._is_digest_due = False
        self._is_full_digest_due = False
        """The next digest ends an answer to a repair request for everything."""
        self._seq = 0
        self._own = messages.head(router)

    def set_routers(self, boot_ids: Iterable[tuple[str, str]], now_s: float) -> None:
        """Set the live routers, by boot id. The dispatches of a lost router are forgotten."""
        self.peer_routers.set_routers(
            {name: boot_id for name, boot_id in boot_ids if name != self._router}, now_s
        )
        self.schedule_digest()

    def publish(self, event: DispatchEvent, now_s: float) -> bool:
        """Record an event of this router. Return True if it waits to be written: there are peer routers.

        A start or a finish waits for other messages (see `due_s`).
        """
        self.open.record(event)
        if not len(self.peer_routers):
            return False
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self.dropped_total += 1
        self._waiting.append(event)
        self._window.add(now_s, is_urgent=isinstance(event, Dispatched))
        return True

    def schedule_digest(self) -> None:
        """Send a digest of all open dispatches with the next entry."""
        self._is_digest_due = len(self.peer_routers) > 0

    def drop(self, unwritten: Entry | None) -> None:
        """Drop the waiting messages, and the entry `unwritten` that Redis refused. The next digest repairs the loss."""
        lost = (*self._waiting, *(unwritten.messages if unwritten is not None else ()))
        self.dropped_total += sum(isinstance(message, Dispatched | Started | Finished) for message in lost)
        self._waiting.clear()
        self._window.clear()
        self._is_full_digest_due = False
        self.schedule_digest()

    def due_s(self, now_s: float) -> float:
        """Return the time from which `next_entry` is to be written: not after `now_s` if now, infinite if there is none."""
        if self._is_digest_due or self.peer_routers.requested_ids:
            return now_s
        if self.is_reading and self.peer_routers.has_repair_requests(now_s):
            return now_s
        return self._window.due_s if self._waiting else inf

    @property
    def has_rest(self) -> bool:
        """Return True right after `next_entry` if its entry could not hold all messages."""
        return bool(self._waiting)

    def next_entry(self, now_s: float) -> Entry | None:
        """Return the entry to write now. A digest goes last, after all dispatches that it lists."""
        requested_ids = self.peer_routers.requested_ids
        if self._is_full_digest_due:
            # The full answer is being sent. A router that asked late learns from the digest at its end what to request.
            requested_ids.discard(ALL_IDS)
        if requested_ids:
            if ALL_IDS in requested_ids:
                self._is_full_digest_due = True
                self._waiting.extend(self.open.measured)
            coming = {message.request_id for message in self._waiting if isinstance(message, Dispatched)}
            missed = self.open.request_ids() if ALL_IDS in requested_ids else requested_ids
            self._waiting.extend(self.open.events_of(each for each in missed if each not in coming))
            requested_ids.clear()
            self._is_digest_due = True
        outgoing: list[Message] = []
        if self.is_reading:
            outgoing += self.peer_routers.repair_requests(now_s)[: ENTRY_MESSAGES_MAX // 2]
        hashes = 0
        while self._waiting and len(outgoing) < ENTRY_MESSAGES_MAX - 1:
            message = self._waiting[0]
            if isinstance(message, Dispatched):
                hashes += len(message.hashes)
                if hashes > HASHES_MAX and outgoing:
                    break
            outgoing.append(self._waiting.popleft())
        if not self._waiting:
            self._window.clear()
        if self._is_digest_due and not self._waiting:
            outgoing.append(self.open.digest(is_full=self._is_full_digest_due))
            self._is_digest_due = self._is_full_digest_due = False
        if not outgoing:
            return None
        self._seq += 1
        return Entry(self._router, self._boot_id, self._seq, outgoing)

    def encoded(self, entry: Entry, now_s: float) -> bytes:
        """Return `entry` as bytes to be written now."""
        self.propagation_delay.sent(entry.seq, now_s)
        return messages.encode(entry, now_s)

    def is_own(self, data: bytes, now_s: float) -> bool:
        """Return True if `data` is an entry of this router, also of an earlier process. Records its propagation delay.

        The messages of an own entry are not decoded.
        """
        if not data.startswith(self._own):
            return False
        seq = messages.seq_of(data, self._router, self._boot_id)
        if seq is not None:
            self.propagation_delay.read(seq, now_s)
        return True

    def applying(self, data: bytes, now_s: float) -> Generator[None, None, None]:
        """Apply an entry that was read, message by message. Own entries come back too. Raises GossipError."""
        if self.is_own(data, now_s):
            return
        entry = messages.decode(data, now_s, DISPATCH_LIFE_S, self.propagation_delay.seconds)
        yield from self.peer_routers.applying(entry, now_s)
