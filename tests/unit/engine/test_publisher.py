"""Subscriptions: snapshot and events without a gap, and an overflow error for slow subscribers."""

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from engines.contract import errors
from engines.contract.kv_events import (
    MESSAGE_BLOCKS_MAX,
    BlocksRemoved,
    BlocksStored,
    EventReplayBuffer,
    NumberedEvent,
    batch_messages,
    snapshot_messages,
)
from engines.contract.publisher import Publisher
from engines.contract.request import EventCursor
from tests.unit.engine.engines import CONFIG, running, wait_until

_TOKENS = bytes(4 * CONFIG.block_tokens)


@dataclass
class Collector:
    """A subscriber that keeps all messages and can be blocked."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    end: list[str | None] = field(default_factory=list)
    may_send: threading.Event = field(default_factory=threading.Event)
    messages_max: int | None = None

    def __post_init__(self) -> None:
        self.may_send.set()

    def send(self, payload: bytes) -> None:
        assert self.may_send.wait(5.0)
        assert not self.end, "something came after the end"
        self.messages.append(msgspec.json.decode(payload))

    def finish(self, error: str | None) -> None:
        self.end.append(error)

    def is_full(self) -> bool:
        return self.messages_max is not None and len(self.messages) >= self.messages_max

    def events(self) -> list[dict[str, Any]]:
        return [event for message in self.messages for event in message.get("events", [])]

    def has_reached(self, cached: set[int]) -> bool:
        """Return whether all received messages add up to `cached`."""
        return bool(self.messages) and self.cached() == cached

    def cached(self) -> set[int]:
        """Return the hashes after applying snapshot and events in order."""
        seen: set[int] = set()
        first = self.messages[0]
        parts = [message for message in self.messages if "snapshot" in message]
        assert [(part["part"], part["more"]) for part in parts] == [
            (number, number < len(parts) - 1) for number in range(len(parts))
        ]
        snapshot = [data for part in parts for data in part["snapshot"]]
        for data in [*snapshot, *(event["data"] for event in self.events())]:
            if data["type"] == "stored":
                assert data["parent_hash"] is None or data["parent_hash"] in seen
                seen |= {block["block_hash"] for block in data["blocks"]}
            else:
                seen -= set(data["block_hashes"])
        ids = [event["event_id"] for event in self.events()]
        assert ids == list(range(first["event_id"] + 1, first["event_id"] + 1 + len(ids)))
        return seen


def test_snapshot_and_events_replay_to_the_cache() -> None:
    """At any time of subscription, applying snapshot and events yields exactly the prefix table."""
    rng = np.random.default_rng(3)
    with running(kv_blocks=20) as harness:
        subscribers: list[Collector] = []
        for turn in range(30):
            if turn % 7 == 0:
                subscribers.append(Collector())
                harness.engine.subscribe_events(1000 + turn, subscribers[-1])
            harness.run(rng.integers(0, 4096, int(rng.integers(8, 80)), dtype=np.int32), 5)
        cached = {value for stored in harness.engine.core.pool.snapshot() for value, _ in stored.blocks}
        assert cached
        for subscriber in subscribers:
            wait_until(partial(subscriber.has_reached, cached), "caught up")
    assert all(subscriber.end == [errors.SHUTTING_DOWN] for subscriber in subscribers)


def test_a_slow_subscriber_gets_an_overflow_error() -> None:
    """The buffer is bounded; an overflow ends one subscription, and the error says how to continue."""
    publisher, slow = Publisher("boot", buffered_events_max=10), Collector()
    publisher.start()
    with running() as harness:
        load = harness.engine.core.load()
    publisher.subscribe_events(1, slow, [])
    wait_until(lambda: len(slow.messages) == 1, "snapshot")
    slow.may_send.clear()
    for value in range(40):
        publisher.publish([BlocksStored(None, ((value, _TOKENS),)), BlocksRemoved((value,))], load)
    slow.may_send.set()
    wait_until(lambda: bool(slow.end), "ended")
    assert slow.end == [errors.SUBSCRIPTION_OVERFLOW.format(events=10)]
    publisher.close()
    assert len(slow.end) == 1


def test_a_subscription_ends_at_max_bytes_and_resumes_without_loss() -> None:
    """No event is lost between one subscription and the next, for any events published in between."""
    publisher = Publisher("boot")
    publisher.start()
    with running() as harness:
        load = harness.engine.core.load()
    seen: list[int] = []
    for turn in range(6):
        subscriber = Collector(messages_max=1 + turn % 3)
        last_id = seen[-1] if seen else 0
        assert publisher.resume_events(turn, subscriber, last_id)
        while not subscriber.end:
            publisher.publish([BlocksRemoved((len(seen),))], load)
            wait_until(partial(_has_news, subscriber, last_id), "told")
            last_id = max(last_id, _last(subscriber))
        assert subscriber.end == [None]
        publisher.publish([BlocksRemoved((0,))], load)
        seen += [event["event_id"] for event in subscriber.events()]
    loads = Collector(messages_max=2)
    publisher.subscribe_load(100, loads)
    wait_until(lambda: bool(loads.end), "enough load reports")
    publisher.close()
    assert seen == list(range(1, len(seen) + 1))
    assert (loads.end, len(loads.messages)) == ([None], 2)


def _has_news(subscriber: Collector, last_id: int) -> bool:
    return bool(subscriber.end) or _last(subscriber) > last_id


def _last(subscriber: Collector) -> int:
    events = subscriber.events()
    return int(events[-1]["event_id"]) if events else 0


def test_load_reports_come_on_change_and_as_heartbeats() -> None:
    """The first report is sent at once, changes follow, and heartbeats come without changes."""
    publisher, subscriber = Publisher("boot"), Collector()
    publisher.start()
    with running() as harness:
        load = harness.engine.core.load()
    publisher.publish([], load)
    publisher.subscribe_load(1, subscriber)
    wait_until(lambda: len(subscriber.messages) == 1, "first report", 0.5)
    wait_until(lambda: len(subscriber.messages) == 2, "a report without any change", 2.0)
    first, second = ({**each, "resident_bytes": 0} for each in subscriber.messages[:2])
    assert first == second  # this process may grow by a page meanwhile
    publisher.unsubscribe(1)
    wait_until(lambda: subscriber.end == [None], "ended")
    publisher.close()


def test_a_large_snapshot_comes_in_parts() -> None:
    """For any length of runs no message exceeds the block limit, and the parts add up to the cache."""
    for count in (0, 1, MESSAGE_BLOCKS_MAX, MESSAGE_BLOCKS_MAX + 1, 5 * MESSAGE_BLOCKS_MAX - 3):
        run = BlocksStored(None, tuple((value + 1, _TOKENS) for value in range(count)))
        runs = [run] if count else []
        runs += [BlocksStored(1, ((10_000 + value, _TOKENS),)) for value in range(min(count, 7))]
        subscriber = Collector()
        for message in snapshot_messages("boot", 9, runs):
            subscriber.send(message)
        assert len(subscriber.cached()) == count + min(count, 7)
        sizes = [sum(len(data["blocks"]) for data in part["snapshot"]) for part in subscriber.messages]
        assert max(sizes) <= MESSAGE_BLOCKS_MAX and len(sizes) == max(1, -(-sum(sizes) // MESSAGE_BLOCKS_MAX))


def test_replay_buffer_is_bounded_and_has_no_gaps() -> None:
    """The replay buffer keeps at most `blocks_max` blocks; it returns all events after an id or None."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        recent, everything = EventReplayBuffer(blocks_max=40), list[NumberedEvent]()
        for event_id in range(1, 200):
            count = int(rng.integers(1, 60 if rng.random() < 0.05 else 8))
            blocks = tuple((value, b"") for value in range(count))
            event = BlocksRemoved(tuple(range(count))) if rng.random() < 0.5 else BlocksStored(None, blocks)
            everything.append(NumberedEvent(event_id, event))
            recent.add(everything[-1])
            kept = recent.after(event_id - len(recent._events))
            assert kept is not None
            assert (
                sum(
                    len(one.event.hashes if isinstance(one.event, BlocksRemoved) else one.event.blocks)
                    for one in kept
                )
                <= 40
            ), f"seed={seed}"
            asked = int(rng.integers(0, event_id + 3))
            found = recent.after(asked)
            assert found is None or found == everything[asked:], f"seed={seed}"
            assert (found is None) == (asked > event_id or asked < event_id - len(kept)), f"seed={seed}"


def test_a_resumed_subscription_misses_no_event_and_needs_no_snapshot() -> None:
    """Consecutive subscriptions form one stream: no event is lost between them, and none comes twice."""
    rng = np.random.default_rng(5)
    with running(kv_blocks=20) as harness:
        first = Collector()
        harness.engine.subscribe_events(1000, first)
        wait_until(lambda: bool(first.messages), "the snapshot")
        seen, event_id = list(first.messages), 0
        for turn in range(8):
            harness.engine.cancel(1000 + turn)
            harness.run(rng.integers(0, 4096, int(rng.integers(8, 80)), dtype=np.int32), 5)
            again = Collector()
            harness.engine.subscribe_events(1001 + turn, again, EventCursor(harness.engine.boot_id, event_id))
            harness.run(rng.integers(0, 4096, int(rng.integers(8, 80)), dtype=np.int32), 5)
            last_id = harness.engine.publisher._replay_buffer.last_id

            def has_all(subscriber: Collector = again, last_id: int = last_id) -> bool:
                return bool(subscriber.events()) and subscriber.events()[-1]["event_id"] == last_id

            wait_until(has_all, "caught up")
            assert all("snapshot" not in message for message in again.messages)
            seen, event_id = seen + again.messages, last_id
        cached = {value for stored in harness.engine.core.pool.snapshot() for value, _ in stored.blocks}
        assert Collector(seen).cached() == cached


def test_a_cursor_outside_the_replay_buffer_gets_a_snapshot() -> None:
    """A snapshot also comes for a cursor of another boot and for one in the future."""
    with running(kv_blocks=20) as harness:
        engine = harness.engine
        engine.publisher._replay_buffer.blocks_max = 1
        for turn in range(4):
            harness.run(np.arange(40 * turn, 40 * turn + 40, dtype=np.int32), 5)
        for number, cursor in enumerate(
            (EventCursor(engine.boot_id, 0), EventCursor("other", 1), EventCursor(engine.boot_id, 9999))
        ):
            subscriber = Collector()
            engine.subscribe_events(1000 + number, subscriber, cursor)
            wait_until(lambda subscriber=subscriber: bool(subscriber.messages), "a message")  # type: ignore[misc]
            assert "snapshot" in subscriber.messages[0], cursor


def test_message_size_is_bounded() -> None:
    """All events come once and in order; a message has at most MESSAGE_BLOCKS_MAX blocks or a single event, and is
    never empty.
    """
    for seed in range(50):
        rng = np.random.default_rng(seed)
        counts = [int(rng.integers(1, 50)) for _ in range(int(rng.integers(0, 60)))]
        events = [
            NumberedEvent(7 + index, BlocksRemoved(tuple(range(count)))) for index, count in enumerate(counts)
        ]
        messages = [msgspec.json.decode(message)["events"] for message in batch_messages("b", events)]
        assert [one["event_id"] for message in messages for one in message] == [
            one.event_id for one in events
        ]
        for message in messages:
            blocks = sum(len(one["data"]["block_hashes"]) for one in message)
            assert message and (len(message) == 1 or blocks <= MESSAGE_BLOCKS_MAX), f"seed={seed}"
        assert len(messages) <= 1 + 2 * sum(counts) // MESSAGE_BLOCKS_MAX, f"seed={seed}"
