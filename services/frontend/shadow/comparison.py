"""Compares the answer of a copy with the user's answer. Pure.

Tokens are comparable always: the copy has the sampling parameters and the seed of the user's request. At temperature 0 the
seed does not matter. Engines are not perfectly reproducible, so differences are judged against those of an A/A shadow.

The first difference ends the comparison of a pair: all later tokens follow from it. The rate is therefore first
differences per compared token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.frontend.requests import faults
from services.frontend.requests.outcome import CUT
from services.frontend.requests.request import LiveRequest

TOKENS_KEPT: Final = 16
"""Tokens of a difference that are kept, from its position on."""

OK: Final = "ok"

CUT_REASONS: Final = frozenset(
    {
        *(CUT, "CLIENT_GONE", "DEADLINE", "TTFT_TIMEOUT", "SLOW_READER", "INFEASIBLE_DEADLINE"),
        *("SUPERSEDED", "DRAINING"),
    }
)
"""Ends of a user's request that its client or its frontend caused. They say nothing about the model's answer."""

UNPLACED: Final = frozenset(
    {
        *("QUEUE_FULL", "KV_FULL", "QUEUE_TIMEOUT", "SHED", "DRAINING", "INFEASIBLE_DEADLINE"),
        *(faults.NO_ROUTER, faults.NO_REPLICA, faults.STALE_SNAPSHOT, faults.ROUTER_LOST, "CLIENT_GONE"),
    }
)
"""Ends of a copy without a place in its pool: copies are the first to be refused. They are counted, not compared."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that ended."""

    ids: Sequence[int]
    """Token ids of the output."""
    outcome: str
    """OK, or the error reason."""
    finish: str = ""
    """Finish reason; empty after an error."""
    logprobs: Sequence[float] = ()
    """Log-probabilities of `ids`; empty: none were kept."""
    is_cut: bool = False
    """True if the client or its frontend ended the request: only the tokens count."""

    @property
    def shown(self) -> str:
        """The end in words."""
        return f"{self.outcome} {self.finish}".strip()


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a user's answer and a copy."""

    kind: str
    """ "tokens", "error" or "finish"."""
    position: int
    """Output position of the first difference, or the end of the copy."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of one pair. The counts are those of `ShadowArm`."""

    tokens: int = 0
    """Tokens up to and with the first difference, or all common ones."""
    differs_at: int | None = None
    """Output position of the first difference. None: the common tokens are equal."""
    copy_error: str = ""
    """Error of the copy, where the user's request ended well. Empty: none."""
    is_user_error: bool = False
    """True if the user's request failed and the copy did not."""
    has_both_ends: bool = False
    """True if both ended well, and the copy had the user's output limit."""
    is_other_finish: bool = False
    log_length: float | None = None
    """Logarithm of (tokens of the copy + 1) / (tokens of the user's answer + 1). None: not comparable."""
    logprobs: int = 0
    logprob_sum: float = 0.0
    logprob_squared: float = 0.0
    """Tokens with log-probabilities on both sides; sums of the copy's minus the user's."""

    def difference(self, copy: Answer) -> Difference | None:
        """Return what is told of the pair. None: both answers are equal, as far as they are comparable."""
        if self.copy_error or self.is_user_error:
            return Difference("error", len(copy.ids))
        if self.differs_at is not None:
            return Difference("tokens", self.differs_at)
        if self.is_other_finish:
            return Difference("finish", len(copy.ids))
        return None


def answer_of(request: LiveRequest, *, is_users: bool) -> Answer:
    """Return the answer of a request that ended. `is_users`: it is a user's request, which its client may have ended."""
    outcome = request.outcome
    assert outcome is not None, f"{request} has not ended"
    ids, kept = request.progress.ids, request.output.kept_logprobs
    reason = fault_of(request)
    is_cut = is_users and (reason in CUT_REASONS or outcome.name in CUT_REASONS)
    finish = "" if outcome.error is not None else outcome.name.lower()
    logprobs = kept if kept is not None and len(kept) == len(ids) else ()
    return Answer(ids, reason or OK, finish, logprobs, is_cut)


def fault_of(request: LiveRequest) -> str:
    """Return the error class of a request that ended: the fault of its last attempt, else the reason. Empty: no error."""
    error = request.outcome.error if request.outcome is not None else None
    if error is None:
        return ""
    return error.metadata.get("fault") or error.reason


def compare(user: Answer, copy: Answer, *, has_whole_length: bool) -> Compared:
    """Compare a copy with the user's answer. `has_whole_length`: the copy had the output limit of the user's request."""
    common = min(len(user.ids), len(copy.ids))
    at = next((at for at in range(common) if user.ids[at] != copy.ids[at]), None)
    equal = common if at is None else at
    tokens = common if at is None else at + 1
    drifts = [
        mine - theirs
        for mine, theirs in zip(copy.logprobs[:equal], user.logprobs[:equal], strict=False)
        if math.isfinite(mine) and math.isfinite(theirs)
    ]
    is_user_ok, is_copy_ok = user.outcome == OK, copy.outcome == OK
    has_both_ends = has_whole_length and is_user_ok and is_copy_ok and not user.is_cut
    return Compared(
        tokens=tokens,
        differs_at=at,
        copy_error=copy.outcome if is_user_ok and not is_copy_ok and not user.is_cut else "",
        is_user_error=is_copy_ok and not is_user_ok and not user.is_cut,
        has_both_ends=has_both_ends,
        is_other_finish=has_both_ends and user.finish != copy.finish,
        log_length=math.log((len(copy.ids) + 1) / (len(user.ids) + 1)) if has_both_ends else None,
        logprobs=len(drifts),
        logprob_sum=math.fsum(drifts),
        logprob_squared=math.fsum(drift * drift for drift in drifts),
    )
