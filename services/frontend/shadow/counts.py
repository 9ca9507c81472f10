"""Counts of one shadow at one frontend, by session: sums that add up over frontends, and the last differences. Pure.

A test counts sessions as samples, so the sums are over sessions. The figures of a session are kept while it is among the
last SESSIONS_MAX. A later request of a forgotten session counts as a new session.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvmesh.control.v1 import shadow_pb2 as pb
from services.frontend.shadow.comparison import TOKENS_KEPT, Answer, Compared, Difference

SESSIONS_MAX: Final = 20_000
DIFFERENCES_MAX: Final = 1_000
"""Differences that are kept, the last ones."""

REPORTED_MAX: Final = 100
"""Differences in one report."""

BINS_PER_LOG: Final = 100
BIN_MAX: Final = 300
"""Bins of the logarithm of a ratio: 1 % each, from exp(-3) to exp(3)."""


@dataclass(slots=True)
class _OfArm:
    """Figures of one session against one pool."""

    tokens: int = 0
    differences: int = 0
    has_error: bool = False
    lengths: int = 0
    log_length: float = 0.0


@dataclass(slots=True)
class _Ratio:
    """Mean logarithm of a ratio in one session, and its bin."""

    count: int = 0
    total: float = 0.0
    bin: int = 0


@dataclass(slots=True)
class _Session:
    target: _OfArm = field(default_factory=_OfArm)
    baseline: _OfArm = field(default_factory=_OfArm)
    ttft: _Ratio = field(default_factory=_Ratio)
    gap: _Ratio = field(default_factory=_Ratio)


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of one copy that ended well, in seconds."""

    ttft_s: float
    gap_s: float | None
    """Mean gap between tokens. None: fewer than two tokens."""


class ShadowTally:
    """See the module. `boot_id` names the counting."""

    def __init__(self, shadow: str, boot_id: str, *, keeps_tokens: bool = False) -> None:
        self.shadow = shadow
        self.counts = pb.ShadowCounts()
        self.off_reason = ""
        """Reason why nothing is copied now. Empty: requests are copied."""
        self.ledger_tokens = 0
        """Tokens that the mesh has taken from the ceiling, as Redis told last."""
        self._boot_id = boot_id
        self._keeps_tokens = keeps_tokens
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._differences: deque[pb.ShadowDifference] = deque(maxlen=DIFFERENCES_MAX)
        self._difference_total = 0
        self._sent_number = 0
        """Number of the last difference that was sent on this stream."""
        self._sequence = 0
        self._told = b""

    def drop(self, reason: str) -> None:
        """Count a sampled request that was not copied or not compared."""
        self.counts.dropped[reason] += 1

    def add(
        self, session: int, compared: Compared, user: Answer, copy: Answer, *, is_baseline: bool = False
    ) -> None:
        """Count one pair of a session."""
        arm = self.counts.baseline if is_baseline else self.counts.target
        found = self._session(session)
        known = found.baseline if is_baseline else found.target
        arm.pairs += 1
        arm.sessions += not (known.tokens or known.lengths or known.has_error)
        _add_tokens(arm, known, compared)
        if compared.copy_error:
            arm.errors[compared.copy_error] += 1
            arm.error_sessions += not known.has_error
            known.has_error = True
        arm.user_errors += compared.is_user_error
        if compared.has_both_ends:
            arm.ended_pairs += 1
            arm.finish_differences += compared.is_other_finish
            arm.user_output_tokens += len(user.ids)
            arm.copy_output_tokens += len(copy.ids)
        if compared.log_length is not None:
            _add_length(arm, known, compared.log_length)
        arm.logprobs += compared.logprobs
        arm.logprob_sum += compared.logprob_sum
        arm.logprob_squared += compared.logprob_squared

    def add_latency(self, session: int, target: Latency, baseline: Latency) -> None:
        """Count a pair of copies of one request that both ended well."""
        latency, found = self.counts.latency, self._session(session)
        latency.pairs += 1
        if target.ttft_s > 0 and baseline.ttft_s > 0:
            _add_ratio(latency.ttft, found.ttft, math.log(target.ttft_s / baseline.ttft_s))
        if target.gap_s and baseline.gap_s:
            _add_ratio(latency.gap, found.gap, math.log(target.gap_s / baseline.gap_s))

    def note(
        self, found: Difference, request_id: str, pool: str, user: Answer, copy: Answer, at_ms: int
    ) -> None:
        """Keep a difference, in place of the oldest one."""
        self._difference_total += 1
        row = pb.ShadowDifference(
            number=self._difference_total,
            request_id=request_id,
            pool=pool,
            kind=found.kind,
            position=found.position,
            user_outcome=user.shown,
            copy_outcome=copy.shown,
            at_ms=at_ms,
        )
        if self._keeps_tokens:
            until = found.position + TOKENS_KEPT
            row.user_tokens.extend(user.ids[found.position : until])
            row.copy_tokens.extend(copy.ids[found.position : until])
        self._differences.append(row)

    def report(self) -> Sequence[pb.ShadowReport]:
        """Return the counts if they have changed since the last report, with differences that were not sent."""
        report = pb.ShadowReport(
            shadow=self.shadow,
            boot_id=self._boot_id,
            counts=self.counts,
            off_reason=self.off_reason,
            ledger_tokens=self.ledger_tokens,
        )
        told = report.SerializeToString(deterministic=True)
        if told == self._told and self._sent_number == self._difference_total:
            return ()
        self._told = told
        self._sequence += 1
        report.sequence = self._sequence
        unsent = (row for row in self._differences if row.number > self._sent_number)
        for row, _ in zip(unsent, range(REPORTED_MAX), strict=False):
            report.differences.append(row)
            self._sent_number = row.number
        return (report,)

    def resend(self) -> None:
        """Report everything again: the stream is new, or another process leads."""
        self._told, self._sent_number = b"", 0

    def _session(self, session: int) -> _Session:
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = _Session()
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        return found


def _add_tokens(arm: pb.ShadowArm, known: _OfArm, compared: Compared) -> None:
    if not compared.tokens:
        return
    arm.token_pairs += 1
    arm.tokens += compared.tokens
    arm.token_sessions += not known.tokens
    before = (known.differences, known.tokens)
    known.tokens += compared.tokens
    if compared.differs_at is not None:
        arm.differences += 1
        known.differences += 1
    arm.differences_squared += known.differences**2 - before[0] ** 2
    arm.differences_tokens += known.differences * known.tokens - before[0] * before[1]
    arm.tokens_squared += known.tokens**2 - before[1] ** 2


def _add_length(arm: pb.ShadowArm, known: _OfArm, log_length: float) -> None:
    if known.lengths:
        mean = known.log_length / known.lengths
        arm.length_sum -= mean
        arm.length_squared -= mean * mean
    else:
        arm.length_sessions += 1
    known.lengths += 1
    known.log_length += log_length
    mean = known.log_length / known.lengths
    arm.length_sum += mean
    arm.length_squared += mean * mean


def _add_ratio(bins: MutableMapping[int, int], known: _Ratio, log_ratio: float) -> None:
    if known.count:
        bins[known.bin] -= 1
        if not bins[known.bin]:
            del bins[known.bin]
    known.count += 1
    known.total += log_ratio
    mean = known.total / known.count
    known.bin = max(-BIN_MAX, min(BIN_MAX, round(BINS_PER_LOG * mean)))
    bins[known.bin] += 1
