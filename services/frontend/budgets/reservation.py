"""What one request holds of its caller's budget, and where.

Pure.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from kvmesh.buckets.operations import Remaining
from kvmesh.tenants.caller import Caller

if TYPE_CHECKING:
    from services.frontend.budgets.slabs import Slab
    from services.frontend.budgets.standing import Standing


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
            "position",
        ),
        *("progress_at", "prompt_tokens", "slab", "standing", "tokens"),
    )

    def __init__(
        self, rid: str, caller: Caller, standing: Standing | None, prompt_tokens: int, output_tokens: int
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
        self.progress_at = output_tokens + 1
        """Output position from which `Budgets.progress` wants to be called."""
        self.position = 0
        """Output tokens, as it was last told."""
        self.holder = Holder.NOBODY
        self.slab: Slab | None = None
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
    def remaining(self) -> Remaining | None:
        """What is left of the account in its tightest scope, as far as this frontend knows. None: nothing is limited."""
        return None if self.standing is None else self.standing.remaining
