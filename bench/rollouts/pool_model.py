"""A simulated pool whose requests wait for each other: a queue, steps of prefill that requests share, and decode. Pure.

An engine takes at most ACCEPTED_MAX prompts; the others are in the router's queue. A step computes all prompts that the
engine had at its begin. So the TTFT of a session depends on the sessions around it, with the queue and without it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final

from controlplane.rollouts.judge.observation import OK, OpenRequest, RequestEnd, Track

ACCEPTED_MAX: Final = 3
"""Prompts at the engine that are not computed yet."""
STEP_S: Final = 0.02
TOKEN_S: Final = 0.0002
GAP_S: Final = 0.02
GAP_PER_RUNNING: Final = 0.02
"""Share by which each other running request makes the gaps longer."""
TOKENS: Final = (24, 96)
"""Fewest and most uncached tokens of a prompt."""
OUTPUT_TOKENS: Final = 12
DEVIATION: Final = 0.1
"""Deviation of the logarithm of a step's time."""

TURN_S: Final = STEP_S + sum(TOKENS) / 2 * TOKEN_S
"""Time of a step with one prompt. A pool with one such turn each TURN_S is full, but for the steps that turns share."""


class Events:
    """Simulated time: functions that are called in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call `call` at `time_s`."""
        heapq.heappush(self._heap, (time_s, next(self._order), call))

    def run(self, until_s: float) -> None:
        """Call all that is due up to `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
        self.now_s = until_s


@dataclass(eq=False, slots=True)
class Turn:
    """A request."""

    session: str
    arrived_s: float
    tokens: int
    on_end: Callable[[], None]
    """Called at its last token."""
    running: int = 0
    """Requests in decode when the engine took it."""
    queue_s: float | None = None
    """None: it is in the queue."""
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """The version of a pool, beside the good one."""

    prefill: float = 1.0
    """Multiple of the time of a step."""
    gap: float = 1.0
    """Multiple of the time between tokens."""


@dataclass(eq=False, slots=True)
class Pool:
    """One pool. `ends` has the requests that ended since the last batch."""

    track: Track
    events: Events
    random: Random
    speed: Speed = Speed()
    ends: list[RequestEnd] = field(default_factory=list)
    _open: set[Turn] = field(default_factory=set)
    _queue: deque[Turn] = field(default_factory=deque)
    _accepted: list[Turn] = field(default_factory=list)
    _is_busy: bool = False
    _running: int = 0

    def submit(self, turn: Turn) -> None:
        """Take a request that arrives now."""
        self._open.add(turn)
        self._queue.append(turn)
        self._accept()

    def waiting(self) -> list[OpenRequest]:
        """Return the requests without a first token, as frontends tell them."""
        now_s = self.events.now_s
        return [
            OpenRequest(
                self.track,
                turn.session,
                now_s - turn.arrived_s,
                has_first_token=False,
                prompt_tokens=turn.tokens,
                queue_s=now_s - turn.arrived_s if turn.queue_s is None else turn.queue_s,
                running_requests=turn.running,
            )
            for turn in self._open
            if turn.ttft_s is None
        ]

    def _accept(self) -> None:
        while self._queue and len(self._accepted) < ACCEPTED_MAX:
            turn = self._queue.popleft()
            turn.queue_s, turn.running = self.events.now_s - turn.arrived_s, self._running
            self._accepted.append(turn)
        if self._accepted and not self._is_busy:
            self._begin_step()

    def _begin_step(self) -> None:
        batch = list(self._accepted)
        work_s = STEP_S + sum(turn.tokens for turn in batch) * TOKEN_S
        self._is_busy = True
        took_s = work_s * self.speed.prefill * self.random.lognormvariate(0.0, DEVIATION)
        self.events.at(self.events.now_s + took_s, lambda: self._end_step(batch))

    def _end_step(self, batch: list[Turn]) -> None:
        now_s = self.events.now_s
        self._is_busy = False
        del self._accepted[: len(batch)]
        for turn in batch:
            turn.ttft_s = now_s - turn.arrived_s
            busy = 1.0 + GAP_PER_RUNNING * self._running
            gap_s = GAP_S * self.speed.gap * busy * self.random.lognormvariate(0.0, DEVIATION)
            self._running += 1
            self._end_later(turn, gap_s)
        self._accept()

    def _end_later(self, turn: Turn, gap_s: float) -> None:
        def end() -> None:
            self._running -= 1
            self._open.discard(turn)
            self.ends.append(self._ended(turn, gap_s))
            turn.on_end()

        self.events.at(self.events.now_s + OUTPUT_TOKENS * gap_s, end)

    def _ended(self, turn: Turn, gap_s: float) -> RequestEnd:
        return RequestEnd(
            self.track,
            turn.session,
            OK,
            turn.arrived_s,
            self.events.now_s,
            ttft_s=turn.ttft_s,
            queue_s=turn.queue_s or 0.0,
            prompt_tokens=4 * turn.tokens,
            computed_tokens=turn.tokens,
            gap_median_s=gap_s,
            gap_p95_s=1.5 * gap_s,
            running_requests=turn.running,
            output_tokens=OUTPUT_TOKENS,
            finish_reason="length",
            prefill=f"{self.track}-prefill-0",
            decode=f"{self.track}-decode-0",
        )
