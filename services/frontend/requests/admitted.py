"""The requests that are live at a frontend: a bounded set, and the timers of them all.

Pure. Overflow behaviour: refused at once, with a time after which a place is likely to be free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvmesh.deadline_heap import DeadlineHeap
from kvmesh.drain_rate import DrainRate, Stock
from kvmesh.errors import MeshError
from services.frontend.requests import timers
from services.frontend.requests.request import LiveRequest

RETRY_AFTER_MAX_S: Final = 10.0
RETRY_AFTER_MIN_S: Final = 0.05
"""Longest and shortest wait a refused client is told."""

RETRY_AFTER_S: Final = 1.0
"""What it is told before any request has ended."""


class AdmittedRequests:
    """Requests whose client waits, and those that only still clean up behind them (leaving).

    Being read and being served takes a place each; there are `limit`. Who has a handler keeps its place until that is
    gone: a client that does not read holds more than its request.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reading = 0
        """Requests whose message is being parsed and tokenized."""
        self.serving: set[LiveRequest] = set()
        self.leaving: set[LiveRequest] = set()
        self.attended: set[LiveRequest] = set()
        """Requests that have a handler, serving or over."""
        self._staying = 0
        """Those of them that are over."""
        self._by_id: dict[str, list[LiveRequest]] = {}
        """Serving requests by their id; more than one where a client sent one again."""
        self.deadlines: DeadlineHeap[LiveRequest] = DeadlineHeap()
        """When the timers of each are looked at; `schedule` it again after it was due."""
        self._ends = DrainRate(Stock.HELD)
        self._promised_s = float("-inf")
        """When the last client that was refused was told to come back."""

    def __len__(self) -> int:
        return len(self.serving)

    def __repr__(self) -> str:
        return f"AdmittedRequests({len(self.serving)}/{self.limit}, {len(self.leaving)} leaving)"

    def check_capacity(self, now_s: float) -> None:
        """Raise MeshError if every place is taken."""
        taken = len(self.serving) + self._staying + self.reading
        if taken >= self.limit:
            raise MeshError(
                "LIVE_REQUESTS_FULL",
                f"the frontend is full: {taken}/{self.limit} requests are live",
                {"live": str(taken), "limit": str(self.limit)},
                retry_after_s=self._retry_after_s(now_s),
            )

    def _retry_after_s(self, now_s: float) -> float:
        """Return the seconds until a place is likely to be free that nobody was promised, at the rate of ends.

        So clients that are refused together do not come back together.
        """
        between_s = self._ends.wait_s(1, now_s)
        if between_s is None:
            between_s = RETRY_AFTER_S
        self._promised_s = min(max(self._promised_s, now_s) + between_s, now_s + RETRY_AFTER_MAX_S)
        return max(RETRY_AFTER_MIN_S, self._promised_s - now_s)

    @contextmanager
    def capacity_to_read(self, now_s: float) -> Iterator[None]:
        """Hold a place while a request is read; raises MeshError if every place is taken.

        At the end the place is free: who admits the request then does so before anybody else runs.
        """
        self.check_capacity(now_s)
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1

    def admit(self, request: LiveRequest, now_s: float) -> None:
        """Take a place. Ask `check_capacity` first."""
        assert len(self.serving) + self._staying < self.limit
        self.serving.add(request)
        self._ends.stock(len(self.serving) + self._staying, now_s)
        self._by_id.setdefault(request.spec.request_id, []).append(request)

    def attend(self, request: LiveRequest) -> None:
        """A handler serves `request`, which was admitted; it may be over already."""
        self.attended.add(request)
        if request not in self.serving:
            self._staying += 1

    def dismiss(self, request: LiveRequest, now_s: float) -> None:
        """The handler of `request` is gone."""
        self.attended.remove(request)
        if request not in self.serving:
            self._staying -= 1
            self._freed(now_s)

    @property
    def has_handlers(self) -> bool:
        """True if somebody is still written to."""
        return bool(self.attended)

    def executions(self, request_id: str) -> tuple[LiveRequest, ...]:
        """Return the executions of one request that are served here."""
        return tuple(self._by_id.get(request_id, ()))

    def end(self, request: LiveRequest, now_s: float) -> None:
        """Give the place back if no handler has it; the request is kept as leaving until `forget`."""
        self.serving.remove(request)
        self.leaving.add(request)
        executions = self._by_id[request.spec.request_id]
        executions.remove(request)
        if not executions:
            del self._by_id[request.spec.request_id]
        if request in self.attended:
            self._staying += 1
        else:
            self._freed(now_s)

    def _freed(self, now_s: float) -> None:
        self._ends.freed(1, now_s)
        self._ends.stock(len(self.serving) + self._staying, now_s)

    def forget(self, request: LiveRequest) -> None:
        """Drop a request that ended everywhere."""
        self.leaving.remove(request)
        self.deadlines.forget(request)

    def schedule(self, request: LiveRequest) -> None:
        """Look at the timers of `request`; the first may be due earlier or later than before."""
        at_s = timers.wake_s(request)
        if at_s is not None:
            self.deadlines.by(request, at_s)
