"""One user's request and its copies, from the sample to the comparison. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.requests.request import LiveRequest
from services.frontend.shadow.counts import Latency


@dataclass(slots=True, eq=False)
class Copy:
    """A copy in one pool."""

    request: LiveRequest
    pool: str
    taken: int
    """Tokens that the copy took from the ledger."""
    started_s: float
    last_token_s: float = 0.0
    is_settled: bool = False
    """True once the copy has ended and the ledger has its tokens back."""

    def note_token(self, now_s: float) -> None:
        """Note the time of new tokens."""
        self.last_token_s = now_s

    @property
    def used_tokens(self) -> int:
        """Tokens that the copy used: its prompt and its output. 0 if no engine had it.

        An engine may be ahead of the output that arrived, so a copy that broke off counts one window more.
        """
        request = self.request
        if request.attempts and request.attempts[-1].is_untouched:
            return 0
        used = request.spec.prompt_tokens + max(len(request.progress.ids), request.progress.computed_output)
        has_ended_well = request.outcome is not None and request.outcome.error is None
        return used if has_ended_well else used + FLOW_CONTROL_WINDOW

    def latency(self) -> Latency | None:
        """Return the times of a copy that ended well; None: it did not."""
        first_s, outcome = self.request.progress.first_token_s, self.request.outcome
        if first_s is None or outcome is None or outcome.error is not None:
            return None
        gaps = len(self.request.progress.ids) - 1
        gap_s = (self.last_token_s - first_s) / gaps if gaps > 0 else None
        return Latency(first_s - self.started_s, gap_s)


@dataclass(slots=True, eq=False)
class Pair:
    """A user's request, which waits for its copies or has them. The request belongs to the user's core and is only read."""

    user: LiveRequest
    session: int
    queued_s: float
    copies: list[Copy] = field(default_factory=list)

    @property
    def is_copied(self) -> bool:
        """True if each copy has ended."""
        return all(copy.is_settled for copy in self.copies)

    def release(self) -> None:
        """Keep nothing more of the user's output."""
        self.user.output.kept_logprobs = None
