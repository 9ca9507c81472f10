"""Guests of the router: callers of another region, within the grant of that region. Pure.

The control plane renews the grants. A grant that is not renewed decays (`kvmesh.regions.lease`); a message without it does
not end it. A guest is charged with the tokens of its prompt that no cache here is known to have.

INVARIANT: in any time t, the charges of new attempts, less all refunds, are at most grant x t + burst + one prompt. Tokens
that were computed beyond the expected ones are a debt, for which new attempts wait.
INVARIANT: once all attempts ended, no blocks are in flight.
"""

from __future__ import annotations

from typing import Final

from kvmesh.regions.bucket import RETRY_MAX_S, GrantBucket
from kvmesh.regions.lease import LeaseSettings, decayed
from kvmesh.regions.quantity import NOTHING, Quantity
from services.router.regions.home import Home

LEASE: Final = LeaseSettings()

RESERVE: Final = 0.1
"""Part of the burst that attempts of lower classes must leave. Where the grant is short they are refused first."""


class Charge:
    """The charge of one attempt. It is corrected at most once. `end` gives the blocks back, and is called once."""

    __slots__ = ("blocks", "guest", "is_settled", "taken", "tokens")

    def __init__(self, guest: Guest, tokens: int, blocks: int, taken: float) -> None:
        self.guest = guest
        self.tokens = tokens
        """Tokens charged: the expected ones, then the computed ones."""
        self.taken = taken
        """Tokens that the bucket lost: fewer than `tokens` for a resumed attempt beyond its part of the burst."""
        self.blocks = blocks
        self.is_settled = False

    def settle(self, computed_tokens: int) -> None:
        """Replace the expected tokens by the computed ones."""
        if self.is_settled:
            return
        self.is_settled = True
        is_bounded = self.taken < self.tokens  # a resumed attempt beyond its part
        computed = min(self.taken, computed_tokens) if is_bounded else computed_tokens
        self.guest.bucket.correct(self.taken, computed)
        self.guest.net_tokens += computed_tokens - self.tokens
        self.tokens = computed_tokens

    def end(self, *, was_taken: bool) -> None:
        """Give the blocks back, and the tokens of a prompt that no engine had (`was_taken`).

        A prompt that an engine had without a measurement stays charged: otherwise a cancelled prompt would be free.
        """
        if not was_taken:
            self.settle(0)
        self.guest.bucket.release(self.blocks)
        self.blocks = 0


class Guest:
    """The callers of one other region."""

    __slots__ = ("_granted", "_renewed_s", "bucket", "home", "net_tokens", "refused_total")

    def __init__(self, name: str) -> None:
        self.home = Home(name)
        self.bucket = GrantBucket(0.0)
        self.refused_total = 0
        """Attempts refused for lack of a grant."""
        self.net_tokens = 0
        """Tokens charged, without refunds."""
        self._granted = NOTHING
        self._renewed_s = float("-inf")

    def renew(self, grant: Quantity, now_s: float) -> None:
        """Take the grant of a message."""
        self._granted, self._renewed_s = grant, now_s
        self.bucket.set_grant(grant, now_s)

    def grant(self, now_s: float) -> Quantity:
        """Return the grant in force: the last one, decayed by its age."""
        return decayed(self._granted, now_s - self._renewed_s, LEASE)

    def charge(
        self, tokens: int, blocks: int, now_s: float, *, is_resumed: bool, is_lower: bool = False
    ) -> Charge | float:
        """Charge an attempt that should compute `tokens`. Return its charge, or the seconds until a retry.

        A resumed attempt (`is_resumed`) passes an empty bucket, and takes tokens of the upper part of a full one alone
        (`GrantBucket.take`). The attempt continues a stream with tokens that a client has, and its home region is often
        the one that died. Its refusal would lose the answer and all work for it. Such attempts are no more
        than the streams that ran. They are refused where the region has no grant at all: there this region has not agreed
        to serve it. `is_lower`: the attempt is of a class below the default.
        """
        grant = self.grant(now_s)
        if grant != self.bucket.grant:
            self.bucket.set_grant(grant, now_s)
        taken: float = tokens
        if is_resumed and not grant.is_zero:
            taken = self.bucket.take(tokens, blocks, now_s)
        else:
            reserve = RESERVE if is_lower else 0.0
            wait_s = RETRY_MAX_S if grant.is_zero else self.bucket.charge(tokens, blocks, now_s, reserve)
            if wait_s is not None:
                self.refused_total += 1
                return wait_s
        self.net_tokens += tokens
        return Charge(self, tokens, blocks, taken)
