"""Callers of `UnreadCalls` in virtual time: one opens calls without messages, the others are honest. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from kvmesh.errors import MeshError
from kvmesh.unread_calls import UnreadCall, UnreadCalls

TIMEOUT_S = 10.0

Path = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Headers of one call, and the message after them."""

    at_s: float
    caller: Path
    message_s: float | None
    """Time from the headers to the message. None: the message never comes."""


@dataclass(slots=True)
class Crowd:
    """Runs arrivals against one UnreadCalls, and records the time of each call to its read or refusal."""

    unread: UnreadCalls
    read_s: dict[Arrival, float] = field(default_factory=dict)
    refused_s: dict[Arrival, float] = field(default_factory=dict)
    never_read: list[float] = field(default_factory=list)
    """Waiting times of calls that ended without a read."""
    _events: list[tuple[float, int, Arrival | UnreadCall]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _live: dict[UnreadCall, Arrival] = field(default_factory=dict)

    def run(self, arrivals: list[Arrival]) -> None:
        """Let all calls arrive and end."""
        for each in arrivals:
            self._later(each.at_s, each)
        now_s = 0.0
        while self._events or len(self.unread):
            due_s = self.unread.next_due_s()
            if self._events and (due_s is None or self._events[0][0] < due_s):
                now_s, _, what = heapq.heappop(self._events)
                if isinstance(what, Arrival):
                    self._open(what, now_s)
                elif what in self._live:
                    self._end(what, now_s)
            else:
                assert due_s is not None, "calls are open, and no event will end them"
                now_s = max(now_s, due_s)
                ended = self.unread.evict_due(now_s)
                assert ended, "nothing was due"
                for call in ended:
                    self._end(call, now_s)
            self._check()

    def _open(self, arrival: Arrival, now_s: float) -> None:
        try:
            call = self.unread.open(arrival.caller, now_s)
        except MeshError as error:
            assert error.reason == "CALLS_FULL" and error.retry_after_s
            self.refused_s[arrival] = 0.0
            return
        self._live[call] = arrival
        self._later(now_s + TIMEOUT_S, call)
        if call.reading_s is not None:
            self._arrives(call, now_s)

    def _arrives(self, call: UnreadCall, now_s: float) -> None:
        """Schedule the arrival of the message of a call with a reader."""
        arrival = self._live[call]
        if arrival.message_s is not None:
            self._later(max(now_s, arrival.at_s + arrival.message_s), call)

    def _later(self, at_s: float, what: Arrival | UnreadCall) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), what))

    def _end(self, call: UnreadCall, now_s: float) -> None:
        """Close a call: its message is complete, its time is over, or it was evicted."""
        arrival, took_s = self._live.pop(call), now_s - call.opened_s
        if call.reading_s is None:
            self.never_read.append(took_s)
        has_come = arrival.message_s is not None and now_s >= arrival.at_s + arrival.message_s
        is_read = has_come and call.reading_s is not None and not call.is_evicted
        (self.read_s if is_read else self.refused_s)[arrival] = took_s
        successor = self.unread.close(call, now_s)
        if successor is not None:
            self._arrives(successor, now_s)

    def _check(self) -> None:
        unread = self.unread
        assert len(unread.reading) <= unread.readers_max and len(unread) <= unread.calls_max
        assert not unread.waiting or len(unread.reading) == unread.readers_max
