"""Observations of this frontend's requests for the judge of rollouts: counts by pool, requests that ended, open requests.

Pure. A batch of one second is cut by `drain`, and kept until the control plane confirms it. Rows are recorded only while
the snapshot in force has a rollout; counts always. Without a rollout and without a request there is no batch.

INVARIANT, by pool and over all batches, while no row was dropped after its batch was cut: started = ended + dropped + open.
Bounds: ENDS_MAX rows a batch, KEPT_MAX rows in all, KEPT_S. Beyond a bound the oldest rows are dropped and counted. A
request that another region serves is not counted: its attempts say nothing about the pools of the own region.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import sub
from typing import Final

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.snapshot.assignment import session_hash
from services.frontend.requests.attempts import Attempt, waited_s
from services.frontend.requests.outcome import outcome_of
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec

BATCH_S: Final = 0.9
"""Shortest time of a batch. The sender asks once a second."""

ENDS_MAX: Final = 4096
"""Most rows of ended requests in a batch. A row has some 150 bytes, so that a batch stays below gRPC's 4 MB."""

OPEN_MAX: Final = 128
"""Most rows of open requests of one pool in a batch, the oldest first."""

FAILED_MAX: Final = 16
"""Most failed attempts in one row, the last ones."""

KEPT_MAX: Final = 30_000
"""Most rows that are kept in all."""

KEPT_S: Final = 300.0
"""Longest life of an unconfirmed batch."""

SILENT_S: Final = 1.0
"""An open request without a token for this long has a row."""


TIMES_MAX: Final = 33
"""Times of tokens that are kept of one request: the last ones, so that up to 32 gaps are exact."""


@dataclass(slots=True)
class _Counts:
    """Counts of one pool since the last batch. The requests of `open` are open now."""

    started: int = 0
    ended: int = 0
    """Ended requests without a row. Those with a row are counted in the batch of the row."""
    dropped: int = 0
    diverted: int = 0
    open: int = 0


@dataclass(slots=True)
class _Open:
    """An open request, as it is counted."""

    spec: RequestSpec
    """Its spec when it came to the pool."""
    counts: _Counts
    """Counts of that pool."""
    times: deque[float] | None
    """Times of its last tokens. None: no rollout was in force at its start."""
    first_attempt: int = 0
    """Index of its first attempt in the pool."""


@dataclass(slots=True)
class _Batch:
    """A batch: rows until it is cut, then also counts and a sequence number."""

    message: pb.ObservationBatch
    ended_s: list[float] = field(default_factory=list)
    """Time of each row in `message.ends`."""
    add_row: Callable[[], pb.RequestEnd] = field(init=False)
    """Adds a row to `message.ends`."""
    rows: list[pb.RequestEnd] = field(default_factory=list)
    """The rows until the batch is cut: an index into `message.ends` costs more."""
    ended: dict[str, int] = field(default_factory=dict)
    """Ended requests with a row in the batch, by pool."""
    cut_s: float = 0.0
    is_sent: bool = False

    def __post_init__(self) -> None:
        self.add_row = self.message.ends.add

    @property
    def oldest_s(self) -> float:
        """Time of its first row, or of its cut."""
        return self.ended_s[0] if self.ended_s else self.cut_s


class Observations:
    """See the module. `boot_id` names the numbering of the batches."""

    def __init__(self, boot_id: str = "") -> None:
        self.dropped_total = 0
        """Rows that were dropped because of a bound."""
        self.kept_rows = 0
        """Rows in batches that are not confirmed, and rows of no batch yet."""
        self._boot_id = boot_id
        self._rollout = ""
        self._open: dict[LiveRequest, _Open] = {}
        self._counts: dict[str, _Counts] = {}
        """By pool. A pool without an open request is left out after the batch that told of it."""
        self._uncut: deque[_Batch] = deque()
        """Rows of no batch yet, the oldest first, in portions of at most ENDS_MAX."""
        self._batches: deque[_Batch] = deque()
        """Cut and unconfirmed, the oldest first."""
        self._sequence = 0
        self._cut_s = float("-inf")

    def take_rollout(self, rollout: str) -> None:
        """Record rows from now on if `rollout` is not empty."""
        self._rollout = rollout

    # Requests.

    def on_start(self, request: LiveRequest) -> None:
        """Count an admitted request, in the pool of its spec."""
        times: deque[float] | None = None
        if self._rollout:
            times = deque((), TIMES_MAX)  # noqa: RUF037  # the keyword costs as much as the deque
            request.note_token_s = times.append
        self._start(request, times)

    def on_diverted(self, pool: str) -> None:
        """Count a new request that went elsewhere, because `pool`, which the weights chose, cannot place."""
        self._of(pool).diverted += 1

    def on_moved(self, request: LiveRequest, fault: str, now_s: float) -> None:
        """Count the end of `request` in the pool that it left by `fault`, and its start in the pool of its spec."""
        before = self._open.pop(request, None)
        if before is not None:
            before.counts.diverted += 1
            self._end(request, before, fault, now_s)
        self._start(request, None if before is None else before.times, len(request.attempts))

    def on_end(self, request: LiveRequest) -> None:
        """Count a request at the end of its client's side. Its outcome is set."""
        request.note_token_s = None
        open_ = self._open.pop(request, None)
        if open_ is None:
            return
        assert request.outcome is not None
        error = request.outcome.error
        self._end(request, open_, "ok" if error is None else error.reason, request.ended_s)

    def _start(self, request: LiveRequest, times: deque[float] | None, first_attempt: int = 0) -> None:
        spec = request.spec
        if spec.region:
            return
        counts = self._counts.get(spec.pool) or self._of(spec.pool)
        counts.started += 1
        counts.open += 1
        self._open[request] = _Open(spec, counts, times, first_attempt)

    def _of(self, pool: str) -> _Counts:
        return self._counts.setdefault(pool, _Counts())

    def _end(self, request: LiveRequest, open_: _Open, outcome: str, now_s: float) -> None:
        open_.counts.open -= 1
        if open_.times is None or not self._rollout:
            open_.counts.ended += 1
            return
        if self.kept_rows >= KEPT_MAX:
            self._drop_oldest()
        if not self._uncut or len(self._uncut[-1].ended_s) >= ENDS_MAX:
            self._uncut.append(_Batch(pb.ObservationBatch(boot_id=self._boot_id)))
        batch = self._uncut[-1]
        row, pool = batch.add_row(), open_.spec.pool
        batch.rows.append(row)
        batch.ended_s.append(now_s)
        batch.ended[pool] = batch.ended.get(pool, 0) + 1
        _fill(row, request, open_, outcome, now_s)
        self.kept_rows += 1

    # Batches.

    def drain(self, now_s: float) -> pb.ObservationBatch | None:
        """Return the next batch to send: an unconfirmed one that this leader does not have, or a new one. None: not now."""
        self._expire(now_s)
        for batch in self._batches:
            if not batch.is_sent:
                return _sent(batch, now_s)
        if now_s - self._cut_s < BATCH_S:
            return None
        self._cut_s = now_s
        if not self._has_news():
            return None
        batch = self._cut(now_s)
        if self._rollout or batch.ended_s:
            self._batches.append(batch)
        return _sent(batch, now_s)

    def confirm(self, sequence: int) -> None:
        """Forget the batches up to `sequence`: the control plane has stored them."""
        while self._batches and self._batches[0].message.sequence <= sequence:
            self.kept_rows -= len(self._batches.popleft().ended_s)

    def resend(self) -> None:
        """Send all unconfirmed batches again, from the next `drain` on: the stream is new, or another process leads."""
        for batch in self._batches:
            batch.is_sent = False

    def _has_news(self) -> bool:
        """True if the control plane has to hear of a request, or of none during a rollout."""
        return bool(self._rollout or self._uncut or self._counts)

    def _expire(self, now_s: float) -> None:
        for batches in (self._batches, self._uncut):
            while batches and now_s - batches[0].oldest_s > KEPT_S:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest batch, or without a batch the oldest rows."""
        batch = self._batches.popleft() if self._batches else self._uncut.popleft()
        self.kept_rows -= len(batch.ended_s)
        self.dropped_total += len(batch.ended_s)
        for pool, count in batch.ended.items():
            self._of(pool).dropped += count

    def _cut(self, now_s: float) -> _Batch:
        self._sequence += 1
        batch = self._uncut.popleft() if self._uncut else _Batch(pb.ObservationBatch(boot_id=self._boot_id))
        batch.cut_s, message = now_s, batch.message
        message.sequence = self._sequence
        for ended_s, row in zip(batch.ended_s, batch.rows, strict=True):
            age_s = now_s - ended_s
            row.age_ms = int(1000 * age_s) if age_s > 0 else 0
        batch.rows.clear()
        if self._rollout:
            message.open.extend(self._open_rows(now_s))
        self._tell_counts(batch, now_s)
        return batch

    def _tell_counts(self, batch: _Batch, now_s: float) -> None:
        """Add the counts to a batch, and begin them anew."""
        for pool in sorted(self._counts.keys() | batch.ended.keys()):
            counts = self._of(pool)
            batch.message.counts.add(
                pool=pool,
                started=counts.started,
                ended=counts.ended + batch.ended.get(pool, 0),
                dropped=counts.dropped,
                open=counts.open,
                diverted=counts.diverted,
            )
            counts.started = counts.ended = counts.dropped = counts.diverted = 0
            if not counts.open:
                del self._counts[pool]

    def _open_rows(self, now_s: float) -> Iterator[pb.OpenRequest]:
        count: Counter[str] = Counter()
        for request, open_ in self._open.items():
            spec = open_.spec
            if open_.times is None:
                continue
            silent_s = now_s - (open_.times[-1] if open_.times else spec.timing.arrived_s)
            if silent_s < SILENT_S or count[spec.pool] >= OPEN_MAX:
                continue
            count[spec.pool] += 1
            has_first_token = request.progress.first_token_s is not None
            attempts, age_s = _attempts(request, open_), now_s - spec.timing.arrived_s
            placement = attempts[-1].placement if attempts else None
            yield pb.OpenRequest(
                pool=spec.pool,
                rollout=spec.rollout,
                session=session_hash(spec.caller.tenant.name, spec.affinity),
                age_s=age_s,
                has_first_token=has_first_token,
                silent_s=silent_s,
                prompt_tokens=spec.prompt_tokens,
                queue_s=0.0 if has_first_token else _queue_s(attempts, age_s, now_s),
                running_requests=0 if placement is None else placement.decode_running_count,
            )


def _sent(batch: _Batch, now_s: float) -> pb.ObservationBatch:
    batch.is_sent = True
    batch.message.age_ms = round(1000 * max(0.0, now_s - batch.cut_s))
    return batch.message


def _fill(row: pb.RequestEnd, request: LiveRequest, open_: _Open, outcome: str, now_s: float) -> None:
    """Fill a row field by field, which costs less than arguments of a constructor."""
    spec, progress, times = open_.spec, request.progress, open_.times
    received, arrived_s, prompt_tokens = (
        len(spec.execution.received_ids),
        spec.timing.arrived_s,
        spec.prompt_tokens,
    )
    first_s, cached = progress.first_token_s, progress.cached_tokens
    row.pool, row.rollout, row.outcome = spec.pool, spec.rollout, outcome
    row.session = session_hash(spec.caller.tenant.name, spec.affinity)
    if first_s is not None and not received and not open_.first_attempt:  # else another pool had a part in it
        row.ttft_s = first_s - arrived_s
    row.prompt_tokens = prompt_tokens
    if cached is not None:
        row.computed_tokens = prompt_tokens - cached
    row.output_tokens, row.duration_s = len(progress.ids) - received, now_s - arrived_s
    if outcome == "ok" and request.outcome is not None:
        row.finish_reason = _FINISH_REASONS[request.outcome.finish_reason]
    attempts = _attempts(request, open_)
    if attempts:
        _add_attempts(row, attempts, now_s)
    row.queue_s = (
        _queue_s(attempts, now_s - arrived_s, now_s) if first_s is None else waited_s(attempts, now_s)
    )
    if times is not None and len(times) > 2:
        row.gap_median_s, row.gap_p95_s = gaps(times)


_FINISH_REASONS: Final = {
    reason: outcome_of(reason).lower() for reason in inference.FinishReason.values() if reason
}


def _attempts(request: LiveRequest, open_: _Open) -> list[Attempt]:
    """Return the attempts in the pool in which the request is counted."""
    attempts = request.upstream.attempts
    return attempts[open_.first_attempt :] if open_.first_attempt else attempts


def _add_attempts(row: pb.RequestEnd, attempts: list[Attempt], now_s: float) -> None:
    last = attempts[-1]
    placement = last.placement
    if placement is not None:
        row.prefill_replica, row.decode_replica = placement.prefill_replica, placement.decode_replica
        row.running_requests = placement.decode_running_count
    if len(attempts) == 1 and not last.fault:
        return
    followed_s = [*(attempt.sent_s for attempt in attempts[1:]), now_s]
    failed = [pair for pair in zip(attempts, followed_s, strict=True) if pair[0].fault]
    for attempt, at_s in failed[-FAILED_MAX:]:
        age_ms = round(1000 * max(0.0, now_s - at_s))
        row.failed_attempts.add(fault=attempt.fault, replica=attempt.failed_replica, age_ms=age_ms)


def _queue_s(attempts: list[Attempt], age_s: float, now_s: float) -> float:
    """Return the time in queues of a request that is `age_s` old: all of it if no engine had it."""
    if any(attempt.is_started or attempt.has_tokens for attempt in attempts):
        return waited_s(attempts, now_s)
    return age_s


def gaps(times: Collection[float]) -> tuple[float, float]:
    """Return median and 95th percentile of the gaps between `times`, two or more.

    A gap lies between two messages of the router. Decode sends each token in a message of its own.
    """
    later = iter(times)
    next(later)
    found = [*map(sub, later, times)]
    found.sort()
    count = len(found)
    return found[count // 2], found[count * 95 // 100]
