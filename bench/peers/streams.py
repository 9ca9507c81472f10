"""The outcome of one stream, and the figures of all streams of a run. Pure.

A stream is done when every expected token came in order, none beyond, with the end of the protocol. Otherwise it
failed: `wrong` with an unexpected token, else `lost` after a first token, `refused` before it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class Outcome(enum.Enum):
    """How a stream ended."""

    DONE = "done"
    LOST = "lost"
    """Cut, failed, ended early or silent for too long, after its first token."""
    REFUSED = "refused"
    """The same before the first token: the client may send it again."""
    WRONG = "wrong"
    """A token missing, repeated, altered or beyond the last one."""


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are seconds on the run's clock, 0 when the load begins."""

    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    last_token_s: float | None = None
    pause_s: float = 0.0
    """Longest time between two arrivals of tokens, or from the last one to the end."""
    pause_end_s: float = 0.0
    token_count: int = 0
    workers: list[str] = field(default_factory=list)
    """Workers of the stream, in order; one unless it was resumed."""
    outcome: Outcome | None = None
    detail: str = ""

    def arrive(self, now_s: float, tokens: int) -> None:
        """Record `tokens` that came together."""
        if self.first_s is None:
            self.first_s = now_s
        self._pause(now_s)
        self.last_token_s = now_s
        self.token_count += tokens

    def end(self, now_s: float, outcome: Outcome, detail: str = "") -> None:
        """Record the end. A loss before the first token is a refusal."""
        if outcome is Outcome.LOST and self.first_s is None:
            outcome = Outcome.REFUSED
        self._pause(now_s)
        self.ended_s, self.outcome, self.detail = now_s, outcome, detail

    def _pause(self, now_s: float) -> None:
        if self.last_token_s is not None and now_s - self.last_token_s > self.pause_s:
            self.pause_s, self.pause_end_s = now_s - self.last_token_s, now_s


@dataclass(frozen=True, slots=True)
class Fault:
    """Times of the fault on the run's clock. `victim` and `returned` name the worker before and after."""

    victim: str
    returned: str
    killed_s: float
    started_s: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run."""

    done: int
    lost: int
    refused: int
    wrong: int
    hit: int
    """Streams on the victim when it died, as far as the client knows."""
    moved: int
    """Streams that continued on another worker and were done."""
    pause_s: float
    """Longest pause within a stream that ended after the kill."""
    moved_pause_s: float | None
    """Longest pause within a moved stream; None: there were none."""
    quiet_pause_s: float
    """Longest pause before the kill: the noise of the machine."""
    first_wait_s: float
    """Longest wait for a first token after the kill."""
    ready_s: float
    """From the start of the returned worker until it could serve."""
    readmitted_s: float | None
    """From ready until the first token of a request on the returned worker; None: not within `watched_s`."""
    watched_s: float
    """Time that the returned worker was watched after it was ready."""
    details: tuple[str, ...]
    """Errors of failed streams, each with its count."""


def figures(streams: Sequence[Stream], fault: Fault, ended_s: float) -> Figures:
    """Sum up the streams of a run that was watched until `ended_s`."""
    count = Counter(stream.outcome for stream in streams)
    back_s = readmitted_s(streams, fault)
    moved = [stream for stream in streams if len(stream.workers) > 1 and stream.outcome is Outcome.DONE]
    failed = Counter(
        f"{one.outcome.value}: {one.detail}"
        for one in streams
        if one.outcome and one.outcome is not Outcome.DONE
    )
    return Figures(
        done=count[Outcome.DONE],
        lost=count[Outcome.LOST],
        refused=count[Outcome.REFUSED],
        wrong=count[Outcome.WRONG],
        hit=sum(was_hit(stream, fault) for stream in streams),
        moved=len(moved),
        pause_s=_longest(stream.pause_s for stream in streams if stream.pause_end_s > fault.killed_s),
        moved_pause_s=max((stream.pause_s for stream in moved), default=None),
        quiet_pause_s=_longest(stream.pause_s for stream in streams if stream.ended_s <= fault.killed_s),
        first_wait_s=_longest(
            stream.first_s - stream.sent_s
            for stream in streams
            if stream.first_s is not None and stream.first_s > fault.killed_s
        ),
        ready_s=fault.ready_s - fault.started_s,
        readmitted_s=None if back_s is None else back_s - fault.ready_s,
        watched_s=ended_s - fault.ready_s,
        details=tuple(f"{times} x {text}" for text, times in failed.most_common()),
    )


def was_hit(stream: Stream, fault: Fault) -> bool:
    """True if the victim was serving `stream` when it died."""
    return stream.workers[:1] == [fault.victim] and stream.sent_s <= fault.killed_s < stream.ended_s


def readmitted_s(streams: Iterable[Stream], fault: Fault) -> float | None:
    """Return the time of the returned worker's first token of a new request; None: it served none."""
    served = (
        stream.first_s
        for stream in streams
        if stream.workers[-1:] == [fault.returned]
        and len(stream.workers) == 1
        and stream.first_s is not None
        and stream.first_s >= fault.started_s
    )
    return min(served, default=None)


def _longest(values: Iterable[float]) -> float:
    return max(values, default=0.0)
