"""Totals of one session on one track: the sample of the judge. Pure.

Times are whole microseconds, so that sums do not depend on their order, and merged totals equal those of one observer.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from controlplane.rollouts.judge.observation import CLIENT, OK, RequestEnd

KEY_BITS: Final = 53
"""Of a session's key. Every reader of JSON keeps so many."""
KEY_MAX: Final = (1 << KEY_BITS) - 1
CELLS_MAX: Final = 8
"""Errors of one class that a session keeps."""
CLASSES_MAX: Final = 16
"""Error classes that a session keeps."""
MICROSECONDS: Final = 1_000_000

Cell = tuple[int, str]
"""Second and replica of an error."""
FirstRequest = tuple[int, int, int]
"""Start in microseconds, prompt tokens and computed tokens."""


def session_key(session: str) -> int:
    """Return the key of a session. It is uniform, and independent of the hash that assigns tracks."""
    return xxhash.xxh64_intdigest(session.encode("utf-8", "surrogatepass"), 0x1D6E) >> (64 - KEY_BITS)


class SessionTotals(msgspec.Struct, array_like=True):
    """Sums over the requests of a session. A row in the rollout's document, so fields are only appended."""

    judged: int = 0
    """Requests with an outcome that the client did not cause."""
    ttft_n: int = 0
    ttft_us: int = 0
    late_n: int = 0
    """Requests that ended without a token, by the client, out of a queue: their TTFT is at least their age."""
    late_us: int = 0
    work_n: int = 0
    """Requests of both kinds with a known number of prompt tokens."""
    work_tokens: int = 0
    """Their uncached tokens. Of a request that reached no prefill replica: all tokens of its prompt."""
    gap_n: int = 0
    gap_us: int = 0
    running: int = 0
    """Running requests at decode, summed over the requests with a gap."""
    share_n: int = 0
    """Requests with known computed tokens."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    first: FirstRequest | None = None
    """Of the requests with known computed tokens."""
    errors: dict[str, list[Cell]] = {}
    queue_us: int = 0
    """Part of `ttft_us` that is time in queues."""
    late_queue_us: int = 0
    """Part of `late_us` that is time in queues."""
    work_running: int = 0
    """Running requests at decode, summed over the requests of `work_n`."""
    queued_n: int = 0
    """Requests whose client gave up while they were in queues. The absolute bound alone judges them."""
    queued_us: int = 0

    def add(self, end: RequestEnd) -> None:
        """Add a request. Its TTFT counts whatever ended it."""
        if end.ttft_s is not None:
            self.ttft_n += 1
            self.ttft_us += round(end.ttft_s * MICROSECONDS)
            self.queue_us += round(min(end.queue_s, end.ttft_s) * MICROSECONDS)
            self._add_work(end)
        elif end.outcome == CLIENT and end.prompt_tokens > 0:
            self._add_late(end)
        if end.gap_median_s is not None:
            self.gap_n += 1
            self.gap_us += round(end.gap_median_s * MICROSECONDS)
            self.running += end.running_requests
        if end.computed_tokens is not None and end.prompt_tokens > 0:
            self._add_share(end, end.computed_tokens)
        if end.outcome != CLIENT:
            self.judged += 1
        if end.outcome != OK or end.failed_attempts:
            self._add_errors(end)

    def merge(self, other: SessionTotals) -> None:
        """Add the totals of another observer of the same session and track."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        firsts = [first for first in (self.first, other.first) if first is not None]
        self.first = min(firsts, default=None)
        for name, cells in other.errors.items():
            for cell in cells:
                self._add_cell(name, cell)

    @property
    def has_evidence(self) -> bool:
        """Whether the session is a sample: a time, or an outcome of the mesh."""
        return self.judged > 0 or self.ttft_n > 0 or self.late_n > 0 or self.queued_n > 0 or bool(self.errors)

    def _add_late(self, end: RequestEnd) -> None:
        age_s = end.ended_s - end.started_s
        if end.queue_s >= age_s:
            self.queued_n += 1
            self.queued_us += round(age_s * MICROSECONDS)
            return
        self.late_n += 1
        self.late_us += round(age_s * MICROSECONDS)
        self.late_queue_us += round(end.queue_s * MICROSECONDS)
        self._add_work(end)

    def _add_work(self, end: RequestEnd) -> None:
        self.work_n += 1
        self.work_tokens += end.prompt_tokens if end.computed_tokens is None else end.computed_tokens
        self.work_running += end.running_requests

    def _add_share(self, end: RequestEnd, computed: int) -> None:
        self.share_n += 1
        self.prompt_tokens += end.prompt_tokens
        self.computed_tokens += computed
        first = (round(end.started_s * MICROSECONDS), end.prompt_tokens, computed)
        if self.first is None or first < self.first:
            self.first = first

    def _add_errors(self, end: RequestEnd) -> None:
        """Add attempts that failed, and the outcome if no attempt tells it."""
        attempts = [attempt for attempt in end.failed_attempts if attempt.error_class != CLIENT]
        for attempt in attempts:
            self._add_cell(attempt.error_class, (int(attempt.at_s), attempt.replica))
        is_told = any(attempt.error_class == end.outcome for attempt in attempts)
        if end.outcome not in (OK, CLIENT) and not is_told:
            self._add_cell(end.outcome, (int(end.ended_s), end.decode or end.prefill))

    def _add_cell(self, name: str, cell: Cell) -> None:
        """Keep the first cells of the first classes, whatever the order in which they come."""
        cells = self.errors.setdefault(name, [])
        if cell not in cells:
            cells.append(cell)
            cells.sort()
            del cells[CELLS_MAX:]
        if len(self.errors) > CLASSES_MAX:
            del self.errors[max(self.errors)]


_SUMS: Final = tuple(name for name in SessionTotals.__struct_fields__ if name not in ("first", "errors"))
