"""The admitted requests of a frontend: a bounded set (concurrency limit), and the timers of all of them.

Pure. Overflow behaviour: admission control refuses the request at once. The refusal states a time after which a slot is
likely to be free.
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
"""Longest and shortest Retry-After of a refused client."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After before any request has ended."""


class AdmittedRequests:
    """Requests with a waiting client, and requests that only clean up behind the frontend (leaving).

    A request that is read and a request that is served take one slot each; there are `limit` slots. A request with a
    handler keeps its slot until the handler is gone: a client that does not read holds memory after the request's end.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reading = 0
        """Requests with a message that is being parsed and tokenized."""
        self.serving: set[LiveRequest] = set()
        self.leaving: set[LiveRequest] = set()
        self.attended: set[LiveRequest] = set()
        """Requests with a handler, still served or over."""
        self._staying = 0
        """Number of attended requests that are over."""
        self._by_id: dict[str, list[LiveRequest]] = {}
        """Serving requests by their id; several for an id that a client sent again."""
        self.deadlines: DeadlineHeap[LiveRequest] = DeadlineHeap()
        """Next check of the timers of each request. Call `schedule` again after a request was due."""
        self._ends = DrainRate(Stock.HELD)
        self._promised_s = float("-inf")
        """Time at which the last refused client may come back, by its Retry-After."""

    def __len__(self) -> int:
        return len(self.serving)

    def __repr__(self) -> str:
        return f"AdmittedRequests({len(self.serving)}/{self.limit}, {len(self.leaving)} leaving)"

    def check_capacity(self, now_s: float) -> None:
        """Raise MeshError if every slot is taken."""
        taken = len(self.serving) + self._staying + self.reading
        if taken >= self.limit:
            raise MeshError(
                "LIVE_REQUESTS_FULL",
                f"the frontend is full: {taken}/{self.limit} requests are admitted (frontend.max_live_requests)",
                {"live": str(taken), "limit": str(self.limit)},
                retry_after_s=self._retry_after_s(now_s),
            )

    def _retry_after_s(self, now_s: float) -> float:
        """Return the seconds until a slot that no refused client was promised is likely to be free.

        The drain rate of requests gives the estimate. Clients that are refused together therefore come back apart.
        """
        between_s = self._ends.wait_s(1, now_s)
        if between_s is None:
            between_s = RETRY_AFTER_S
        self._promised_s = min(max(self._promised_s, now_s) + between_s, now_s + RETRY_AFTER_MAX_S)
        return max(RETRY_AFTER_MIN_S, self._promised_s - now_s)

    @contextmanager
    def capacity_to_read(self, now_s: float) -> Iterator[None]:
        """Hold a slot while a request is read; raises MeshError if every slot is taken.

        The slot is free at the end. The caller admits the request then, before any other task runs.
        """
        self.check_capacity(now_s)
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1

    def admit(self, request: LiveRequest, now_s: float) -> None:
        """Take a slot. Call `check_capacity` first."""
        assert len(self.serving) + self._staying < self.limit
        self.serving.add(request)
        self._ends.stock(len(self.serving) + self._staying, now_s)
        self._by_id.setdefault(request.spec.request_id, []).append(request)

    def attend(self, request: LiveRequest) -> None:
        """Note that a handler serves the admitted `request`, which may be over already."""
        self.attended.add(request)
        if request not in self.serving:
            self._staying += 1

    def dismiss(self, request: LiveRequest, now_s: float) -> None:
        """Note that the handler of `request` is gone."""
        self.attended.remove(request)
        if request not in self.serving:
            self._staying -= 1
            self._freed(now_s)

    @property
    def has_handlers(self) -> bool:
        """True if a handler still writes to a client."""
        return bool(self.attended)

    def executions(self, request_id: str) -> tuple[LiveRequest, ...]:
        """Return the executions of one request that this frontend serves."""
        return tuple(self._by_id.get(request_id, ()))

    def end(self, request: LiveRequest, now_s: float) -> None:
        """Free the slot unless a handler keeps it; the request is kept as leaving until `forget`."""
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
        """Drop a request that ended at routers and replicas too."""
        self.leaving.remove(request)
        self.deadlines.forget(request)

    def schedule(self, request: LiveRequest) -> None:
        """Reschedule `request` by its timers; the first may be due earlier or later than before."""
        at_s = timers.wake_s(request)
        if at_s is not None:
            self.deadlines.by(request, at_s)
