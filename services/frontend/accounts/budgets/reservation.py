"""What one request holds of its caller's budget, and where.

Pure.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from kvmesh.buckets.operations import Remaining
from kvmesh.tenants.caller import Caller

if TYPE_CHECKING:
    from services.frontend.accounts.budgets.account_state import AccountState
    from services.frontend.accounts.budgets.quota_lease import QuotaLease


EXTEND_TOKENS: Final = 256
"""A stream that comes near the end of its estimate reserves so much ahead, again and again. So a sweep charges what the
streams of a dead frontend gave, and a debt is seen before it is used."""

MARGIN_TOKENS: Final = 64
"""So many tokens before the end of what is reserved: Redis answers meanwhile."""


class Holder(Enum):
    """Who holds what a request was promised."""

    NOBODY = auto()
    """Nothing is limited, or nothing is reserved yet."""
    SLAB = auto()
    REDIS = auto()
    LOCAL = auto()


class Reservation:
    """One request's. Its frontend calls `Budgets.progress` from `progress_at` on, and settles it once."""

    __slots__ = (
        *(
            "caller",
            "estimate",
            "holder",
            "id",
            "is_doubtful",
            "is_forced",
            "is_live",
            "is_settled",
            "max_tokens",
            "position",
        ),
        *("progress_at", "prompt_tokens", "slab", "standing", "tokens"),
    )

    def __init__(
        self,
        rid: str,
        caller: Caller,
        standing: AccountState | None,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int = 0,
    ) -> None:
        self.id = rid
        """Empty: nothing was reserved."""
        self.caller = caller
        self.standing = standing
        self.prompt_tokens = prompt_tokens
        """Reserved for the prompt."""
        self.estimate = prompt_tokens + output_tokens
        """Reserved at first, tokens."""
        self.tokens = self.estimate
        """Reserved by now."""
        self.max_tokens = max(self.estimate, max_tokens)
        """The most that the request may be charged."""
        is_open = self.max_tokens > self.estimate
        self.progress_at = max(1, output_tokens - MARGIN_TOKENS) if is_open else output_tokens + 1
        """Output position from which `Budgets.progress` wants to be called."""
        self.position = 0
        """Output tokens, as it was last told."""
        self.holder = Holder.NOBODY
        self.slab: QuotaLease | None = None
        self.is_live = True
        """False once its slot is given back."""
        self.is_settled = False
        self.is_forced = False
        self.is_doubtful = False
        """True if Redis may hold it although it was admitted locally."""

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "live" if self.is_live else "ended"
        return f"Reservation({self.id}: {self.tokens} tokens, {self.holder.name.lower()}, {state})"

    @property
    def overrun(self) -> int:
        """Tokens that the request may be charged beyond what it has reserved by now."""
        return self.max_tokens - self.tokens

    @property
    def lacking(self) -> int:
        """Tokens to reserve now: a stream is EXTEND_TOKENS ahead of its output as long as it may have so much."""
        if not self.position:
            return 0
        return min(self.overrun, max(0, self.prompt_tokens + self.position + EXTEND_TOKENS - self.tokens))

    @property
    def remaining(self) -> Remaining | None:
        """What is left of the account in its tightest scope, as far as this frontend knows. None: nothing is limited."""
        return None if self.standing is None else self.standing.remaining
