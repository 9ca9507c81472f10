"""A token bucket that enforces the grant of one source region at one router. Pure.

A prompt of a guest is charged with the tokens that the router expects to compute, at most all of them. The router corrects
the charge once it knows how many were computed.
The blocks of a request are taken with its charge, and released at its end.

INVARIANT: between two corrections, charges in any time t sum to at most rate x t + burst + one prompt.
INVARIANT: a charge takes blocks beyond the grant for one request alone, while no other has any, and up to ALONE times the
grant. Otherwise a request above one router's part of a grant would be refused by idle routers. A smaller grant takes no
blocks from running requests.
`take` keeps neither: it charges an attempt that must not be refused, and leaves NEW_SHARE of the burst to new callers.
"""

from __future__ import annotations

from typing import Final

from kvmesh.regions.quantity import NOTHING, Quantity

BURST_S: Final = 10.0
"""The burst is the rate of this time.

It is the time over which load is measured, so arrivals within the grant are not refused for their order. After the loss of
a region guests wait some seconds instead. Own callers do not: their prompts go before those of guests.
"""

DEBT_S: Final = 2.0
"""Largest debt: the rate of this time. Unless the rate falls, new callers wait no longer than this for wrong estimates."""

NEW_SHARE: Final = 0.5
"""Part of the burst that the streams of a dead region leave to its new callers.

All streams continue here at once, and their tokens are many times the burst. Their charge for all of it refused new callers
for seconds, although there was room.
"""

ALONE: Final = 4.0
"""Blocks of a request alone, by the grant. A grant is split over the routers, of which there are a few."""

RETRY_BLOCKS_S: Final = 1.0
"""Retry-After while blocks are short: their release is not foreseen."""

RETRY_MAX_S: Final = 30.0
"""Longest Retry-After, also of a grant of nothing."""

ROUNDING_TOKENS: Final = 1e-3
"""Shortage that is an error of rounding: a caller that waited for its Retry-After finds no smaller one."""


class GrantBucket:
    """See the module. `level` is in tokens; a prompt larger than the burst passes a full bucket and leaves a debt."""

    __slots__ = ("blocks_used", "grant", "level", "updated_s")

    def __init__(self, now_s: float) -> None:
        """The bucket begins empty and without a grant: a restarted router gives no second burst."""
        self.grant = NOTHING
        self.level = 0.0
        self.blocks_used = 0.0
        self.updated_s = now_s

    @property
    def burst(self) -> float:
        """Largest level."""
        return self.grant.tokens_per_s * BURST_S

    def set_grant(self, grant: Quantity, now_s: float) -> None:
        """Replace the grant. The level is kept, and cut to the new burst."""
        self._refill(now_s)
        self.grant = grant
        self.level = min(self.level, self.burst)

    def charge(self, tokens: float, blocks: float, now_s: float, reserve: float = 0.0) -> float | None:
        """Take `tokens` and `blocks`. Return None, or the seconds after which the caller may retry; then take nothing.

        `reserve`: part of the burst, below 1, that must be left.
        """
        self._refill(now_s)
        rate = self.grant.tokens_per_s
        if rate <= 0:
            return RETRY_MAX_S
        if self.blocks_used + blocks > self.grant.blocks * (1.0 if self.blocks_used > 0 else ALONE):
            return RETRY_BLOCKS_S
        kept = reserve * self.burst
        short = min(tokens, self.burst - kept) + kept - self.level
        if short > ROUNDING_TOKENS:
            return min(RETRY_MAX_S, short / rate)
        self.level -= tokens
        self.blocks_used += blocks
        return None

    def take(self, tokens: float, blocks: float, now_s: float) -> float:
        """Take `blocks`, and `tokens` of what is above NEW_SHARE of the burst. Return the tokens that the level lost."""
        self._refill(now_s)
        taken = max(0.0, min(tokens, self.level - NEW_SHARE * self.burst))
        self.level -= taken
        self.blocks_used += blocks
        return taken

    def correct(self, charged: float, computed: float) -> None:
        """Replace a charge of `charged` tokens by the `computed` ones.

        More computed tokens leave a debt of DEBT_S at most: wrong estimates shut no region out for longer.
        """
        lowest = min(self.level, -DEBT_S * self.grant.tokens_per_s)
        self.level = max(lowest, min(self.burst, self.level + charged - computed))

    def release(self, blocks: float) -> None:
        """Give back the blocks of a request that ended."""
        self.blocks_used = max(0.0, self.blocks_used - blocks)

    def _refill(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self.updated_s)
        self.updated_s = max(self.updated_s, now_s)
        self.level = min(self.burst, self.level + self.grant.tokens_per_s * elapsed_s)
