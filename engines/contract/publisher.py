"""Publishes KV events and load reports to long-lived subscriptions, in a thread of its own.

The engine thread publishes; the publisher's thread encodes and sends, so that a step never waits for a subscriber.
Each subscription to events has a bounded buffer (backpressure). On overflow the subscription ends with an error;
the subscriber then subscribes again and receives a new snapshot.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import msgspec

from engines.contract import errors
from engines.contract.kv_events import (
    BlocksStored,
    EventReplayBuffer,
    KvCacheEvent,
    NumberedEvent,
    batch_messages,
    snapshot_messages,
)
from engines.contract.outputs import LoadReport
from engines.contract.resident_memory import ResidentMemory

COALESCE_S = 0.002  # coalescing window: events wait this long, to be sent in one message
BUFFERED_EVENTS_MAX = 4096  # per subscriber
LOAD_PERIOD_MIN_S = 0.05
LOAD_PERIOD_MAX_S = 1.0


class Subscriber(Protocol):
    """The receiver of a subscription; used by the publisher's thread only."""

    def send(self, payload: bytes) -> None:
        """Send one JSON message."""

    def finish(self, error: str | None) -> None:
        """End the subscription; no message follows."""

    def is_full(self) -> bool:
        """Return whether the subscription has sent `max_bytes`; it then ends, and the subscriber resumes with a new one."""


@dataclass(slots=True)
class _EventsSubscription:
    subscriber: Subscriber
    event_id: int
    snapshot: Sequence[BlocksStored] | None
    pending: list[NumberedEvent] = field(default_factory=list)
    has_overflowed: bool = False


@dataclass(slots=True)
class Publisher:
    """Sends KV events and load reports to subscribers. All public methods are thread-safe."""

    boot_id: str
    buffered_events_max: int = BUFFERED_EVENTS_MAX
    _replay_buffer: EventReplayBuffer = field(default_factory=EventReplayBuffer)
    _events: dict[int, _EventsSubscription] = field(default_factory=dict)
    _loads: dict[int, Subscriber] = field(default_factory=dict)
    _load: LoadReport | None = None
    _is_load_new: bool = False
    _resident_memory: ResidentMemory = field(default_factory=ResidentMemory)  # publisher's thread only
    _ended: list[tuple[Subscriber, str | None]] = field(default_factory=list)
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the sending thread."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every subscription and the thread."""
        with self._changed:
            self._is_closed = True
            for key in [*self._events, *self._loads]:
                self._end(key, errors.SHUTTING_DOWN)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def subscribe_events(self, key: int, subscriber: Subscriber, snapshot: Sequence[BlocksStored]) -> None:
        """Add a subscriber to KV events; `snapshot` is the prefix table after all events published so far."""
        with self._changed:
            self._events[key] = _EventsSubscription(subscriber, self._replay_buffer.last_id, snapshot)
            self._changed.notify()

    def resume_events(self, key: int, subscriber: Subscriber, event_id: int) -> bool:
        """Add a subscriber that has received all events up to `event_id`.

        Returns False, without adding, if a later event was dropped or more than `buffered_events_max` are missing. The
        subscriber then needs a snapshot.
        """
        with self._changed:
            missed = self._replay_buffer.after(event_id)
            if missed is None or len(missed) > self.buffered_events_max:
                return False
            self._events[key] = _EventsSubscription(subscriber, event_id, None, missed)
            self._changed.notify()
            return True

    def subscribe_load(self, key: int, subscriber: Subscriber) -> None:
        """Add a subscriber to load reports. The current report follows within LOAD_PERIOD_MIN_S."""
        with self._changed:
            self._loads[key] = subscriber
            self._is_load_new = True
            self._changed.notify()

    def unsubscribe(self, key: int) -> None:
        """Remove a subscriber; unknown keys are ignored."""
        with self._changed:
            self._end(key, None)
            self._changed.notify()

    def publish(self, events: Sequence[KvCacheEvent], load: LoadReport) -> None:
        """Number `events` and pass events and load on to the sending thread. Never blocks on a subscriber."""
        with self._changed:
            first_id = self._replay_buffer.last_id + 1
            numbered = [NumberedEvent(first_id + index, event) for index, event in enumerate(events)]
            for one in numbered:
                self._replay_buffer.add(one)
            for subscription in self._events.values():
                if len(subscription.pending) + len(numbered) > self.buffered_events_max:
                    subscription.has_overflowed = True
                else:
                    subscription.pending.extend(numbered)
            has_news = bool(numbered) and bool(self._events)
            if load != self._load:
                has_news = has_news or (bool(self._loads) and not self._is_load_new)
                self._load, self._is_load_new = load, True
            if has_news:
                self._changed.notify()

    def _end(self, key: int, error: str | None) -> None:
        subscription, subscriber = self._events.pop(key, None), self._loads.pop(key, None)
        if subscription is not None:
            self._ended.append((subscription.subscriber, error))
        if subscriber is not None:
            self._ended.append((subscriber, error))

    def _run(self) -> None:
        load_sent_s = float("-inf")
        while True:
            with self._changed:
                if not self._has_work():
                    self._changed.wait(self._wait_s(load_sent_s))
                is_closed = self._is_closed
            if not is_closed:
                time.sleep(COALESCE_S)
            self._send_ended()
            self._send_events()
            load_sent_s = self._send_load(load_sent_s)
            if is_closed:
                return

    def _wait_s(self, load_sent_s: float) -> float | None:
        if not self._loads:
            return None
        period_s = LOAD_PERIOD_MIN_S if self._is_load_new else LOAD_PERIOD_MAX_S
        return max(0.0, load_sent_s + period_s - time.monotonic())

    def _has_work(self) -> bool:
        waits = any(
            one.snapshot is not None or one.pending or one.has_overflowed for one in self._events.values()
        )
        return waits or bool(self._ended) or self._is_closed

    def _send_ended(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        for subscriber, error in ended:
            subscriber.finish(error)

    def _send_events(self) -> None:
        with self._changed:
            waiting = [(key, one) for key, one in self._events.items()]
        for key, one in waiting:
            with self._changed:
                snapshot, one.snapshot = one.snapshot, None
                pending, one.pending = one.pending, []
                has_overflowed = one.has_overflowed
                if has_overflowed:
                    self._events.pop(key, None)
            if has_overflowed:
                one.subscriber.finish(errors.SUBSCRIPTION_OVERFLOW.format(events=self.buffered_events_max))
                continue
            if snapshot is not None:
                for message in snapshot_messages(self.boot_id, one.event_id, snapshot):
                    one.subscriber.send(message)
            for message in batch_messages(self.boot_id, pending):
                one.subscriber.send(message)
            if one.subscriber.is_full():
                self._finish(key, one.subscriber)

    def _send_load(self, sent_s: float) -> float:
        now_s = time.monotonic()
        with self._changed:
            period_s = LOAD_PERIOD_MIN_S if self._is_load_new else LOAD_PERIOD_MAX_S
            if self._load is None or not self._loads or now_s - sent_s < period_s:
                return sent_s
            subscribers, load, self._is_load_new = list(self._loads.items()), self._load, False
        load = replace(load, resident_bytes=self._resident_memory.read_bytes(now_s))
        payload = msgspec.json.encode(asdict(load))
        for key, subscriber in subscribers:
            subscriber.send(payload)
            if subscriber.is_full():
                self._finish(key, subscriber)
        return now_s

    def _finish(self, key: int, subscriber: Subscriber) -> None:
        """End a subscription without an error, unless it has ended already."""
        with self._changed:
            was_there = self._events.pop(key, None) is not None or self._loads.pop(key, None) is not None
        if was_there:
            subscriber.finish(None)
