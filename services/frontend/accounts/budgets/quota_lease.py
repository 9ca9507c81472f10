"""A slab: what a frontend holds of a hot account, so that most requests are admitted without a round trip.

Pure. A slab is one reservation in the account's buckets, held for many requests. Requests are promised what was granted
to it before, so it cannot overspend; what they leave over goes back into it. Of tokens

    held in Redis >= free + promised (to requests that run);  used: charged since it was opened, told with the next draw

Open overrun, what running requests may use beyond their promises, is held likewise: held in Redis >= free + promised.

A draw tells what was used and asks for what shall be free from now on: at most SHARE of the burst and of the limit of open
overrun by the number of frontends, and at most what HORIZON_S of the demand needs. What a draw may give back is no longer
given out from the moment it is asked, what it may bring only from the answer on; so a lost answer does no harm. An account
that has grown cold keeps only what runs. A frontend that dies costs at most its slabs, which are swept with their leases. A
request that overran takes from what is free, then from the account's levels, as debt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.buckets.limits import Account

SHARE: Final = 0.25
"""Of a burst, what the free parts of all frontends' slabs may hold together."""

HORIZON_S: Final = 0.5
"""Seconds of demand that are kept free."""

HOT_PER_S: Final = 8.0
"""Requests per second from which an account has a slab; below half of it the slab is given back."""

HALF_LIFE_S: Final = 0.5
"""Of what is known of the demand."""

AGAIN_S: Final = 0.05
"""Least time between two draws: the levels of an account that wants more than its limit trickle."""

RENEW_S: Final = 5.0
"""A draw renews the lease; at least so often."""

_REQUESTS_MIN: Final = 2
"""A slab that cannot hold so many requests saves no round trip."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What to ask of Redis for a slab: a draw, as kvmesh.buckets.operations.Draw has it."""

    number: int
    used_tokens: int
    used_requests: int
    tokens: int
    requests: int
    slots: int
    least_tokens: int
    least_slots: int
    overrun: int = 0
    least_overrun: int = 0


class QuotaLease:
    """The slab of one account at one frontend, named `rid` in Redis. It is opened by its first draw, and once.

    Free requests and slots are below 0 only where Redis had lost its memory, free tokens also after an overrun.
    """

    __slots__ = (
        *(
            "_asked",
            "_drew_at_s",
            "_caps",
            "_low_overrun",
            "_low_requests",
            "_low_slots",
            "_low_tokens",
            "_number",
            "_seen_at_s",
        ),
        *(
            "_overrun_rate",
            "_token_rate",
            "_told_requests",
            "_wanted_overrun",
            "_wanted_requests",
            "_wanted_tokens",
            "free_overrun",
            "free_requests",
            "free_slots",
            "free_tokens",
        ),
        *(
            "is_hot",
            "is_low",
            "live_slots",
            "open_requests",
            "promised_overrun",
            "promised_tokens",
            "rate",
            "rid",
        ),
        *("used_requests", "used_tokens"),
    )

    def __init__(self, rid: str, account: Account, frontends: int, now_s: float) -> None:
        self.rid = rid
        self.free_tokens = self.free_requests = self.free_slots = self.free_overrun = 0
        self.promised_tokens = self.promised_overrun = 0
        self.open_requests = 0
        """Requests that are not settled."""
        self.live_slots = 0
        self.used_tokens = self.used_requests = 0
        """Since it was opened: charged; admitted."""
        self.is_hot = False
        self.is_low = False
        """True if `draw` should be called soon."""
        self.rate = 0.0
        """Requests per second that the account has at this frontend."""
        self._token_rate = self._overrun_rate = 0.0
        self._wanted_requests = self._wanted_tokens = self._wanted_overrun = 0
        self._seen_at_s = now_s
        self._number = 0
        self._told_requests = 0
        self._asked: DrawRequest | None = None
        self._drew_at_s = float("-inf")
        self._low_tokens = self._low_requests = self._low_slots = 0
        self._low_overrun = -1
        self._caps = (0.0, 0.0, 0.0, 0.0)
        self.resize(account, frontends)

    def __repr__(self) -> str:
        return (
            f"QuotaLease({self.rid}: {self.free_tokens}+{self.promised_tokens} tokens, {self.free_requests} requests, "
            f"{self.free_slots}+{self.live_slots} slots, {self.free_overrun}+{self.promised_overrun} overrun, used "
            f"{self.used_tokens} by {self.used_requests})"
        )

    @property
    def is_open(self) -> bool:
        """True if Redis may hold something for it."""
        return self._number > 0

    @property
    def is_holding(self) -> bool:
        """True if Redis may hold more for it than its open requests need."""
        has_free = self.free_tokens + self.free_requests > 0 or self.free_overrun > 0
        return self.is_drawing or self.is_over or (self.is_open and has_free)

    @property
    def is_drawing(self) -> bool:
        """True while a draw has no answer."""
        return self._asked is not None

    @property
    def is_over(self) -> bool:
        """True if it is open for nothing: no request runs, none is expected. Settle it, and use another from then on."""
        return self.is_open and not (self.is_hot or self.is_drawing or self.open_requests or self.live_slots)

    def resize(self, account: Account, frontends: int) -> None:
        """Take the number of frontends that share the account's bursts."""

        def cap(bursts: list[float]) -> float:
            return SHARE * min(bursts) / frontends if bursts else float("inf")

        limits = [scope.limit for scope in account.scopes]
        self._caps = (
            cap([limit.tokens_burst for limit in limits if limit.tokens_per_min]),
            cap([limit.requests_burst for limit in limits if limit.requests_per_min]),
            cap([float(limit.concurrency) for limit in limits if limit.concurrency]),
            cap([limit.tokens_overrun for limit in limits if limit.tokens_per_min and limit.tokens_overrun]),
        )

    def want(self, tokens: int, overrun: int = 0) -> None:
        """Count one request of the account, admitted from here or not."""
        self._wanted_requests += 1
        self._wanted_tokens += tokens
        self._wanted_overrun += overrun

    def admit(self, tokens: int, overrun: int = 0) -> bool:
        """Promise what one request needs; False: it is not there, and the request must ask for itself.

        `overrun`: tokens that it may use beyond.
        """
        free = self.free_tokens - tokens
        if free < 0 or self.free_requests <= 0 or self.free_slots <= 0 or self.free_overrun < overrun:
            return False
        self.free_tokens = free
        self.promised_tokens += tokens
        self.free_overrun -= overrun
        self.promised_overrun += overrun
        self.free_requests -= 1
        self.used_requests += 1
        self.open_requests += 1
        self.free_slots -= 1
        self.live_slots += 1
        if (
            free < self._low_tokens
            or self.free_requests < self._low_requests
            or self.free_slots < self._low_slots
            or self.free_overrun < self._low_overrun
        ):
            self.is_low = True
        return True

    def extend(self, tokens: int) -> None:
        """Promise `tokens` more of its open overrun to a request that runs, whether they are there or not."""
        self.promised_tokens += tokens
        self.free_tokens -= tokens
        self.promised_overrun -= tokens
        self.free_overrun += tokens
        if self.free_tokens < 0:
            self.is_low = True

    def release(self) -> None:
        """Take the slot of a request that ended; its tokens may be known later."""
        self.live_slots -= 1
        self.free_slots += 1

    def settle(self, tokens: int, actual_tokens: int, *, refund_request: bool, overrun: int = 0) -> None:
        """Take back the `tokens` that a request was promised, less what it is charged, and its open `overrun`.

        Its slot apart: see `release`.
        """
        self.promised_overrun -= overrun
        self.free_overrun += overrun
        self.promised_tokens -= tokens
        self.used_tokens += actual_tokens
        self.free_tokens += tokens - actual_tokens
        self.open_requests -= 1
        if refund_request:
            self.used_requests -= 1
            self.free_requests += 1
        if self.free_tokens < 0:
            self.is_low = True

    def draw(self, now_s: float, *, may_grow: bool = True) -> DrawRequest | None:
        """Return what to ask now, if anything. `drawn` or `lost` must follow before the next.

        Called every some 100 ms, and when `is_low`. Without `may_grow` it only renews the lease.
        """
        self.is_low = False
        if self._asked is not None or now_s - self._drew_at_s < AGAIN_S:
            return None
        if not may_grow:
            free = (max(0, self.free_tokens), max(0, self.free_requests), self.free_slots, self.free_overrun)
            return self._ask(*free, now_s) if self.is_open and self._is_due(now_s) else None
        self._measure(now_s)
        tokens, requests, slots, overrun = self._target()
        self._low_tokens, self._low_requests, self._low_slots = tokens // 2, requests // 2, slots // 2
        self._low_overrun = overrun // 2 if overrun else -1
        free = (self.free_tokens, self.free_requests, self.free_slots, self.free_overrun)
        is_short = self.is_hot and (
            free[0] <= self._low_tokens
            or free[1] <= self._low_requests
            or free[2] <= self._low_slots
            or free[3] <= self._low_overrun
        )
        is_idle = not self.is_hot and any(free)
        if not (is_short or self.free_tokens < 0 or (self.is_open and (is_idle or self._is_due(now_s)))):
            return None
        return self._ask(tokens, requests, slots, overrun, now_s)

    def drawn(self, tokens: int, requests: int, slots: int, overrun: int = 0) -> None:
        """Take the answer: what Redis holds for the slab, less what was used of it."""
        ask = self._answered()
        self.free_tokens = tokens - (self.used_tokens - ask.used_tokens) - self.promised_tokens
        # A request that was told and is refunded after is not taken back; Redis overlooks the next one instead.
        self._told_requests = max(self._told_requests, ask.used_requests)
        self.free_requests = requests - (self.used_requests - self._told_requests)
        self.free_slots = slots - self.live_slots
        self.free_overrun = overrun - self.promised_overrun

    def lost(self) -> None:
        """There is no answer, and nobody knows whether there was a draw."""
        self._answered()

    def forfeit(self) -> None:
        """Give nothing out any more: Redis holds nothing for it."""
        self.free_tokens, self.free_requests, self.free_slots = min(0, self.free_tokens), 0, 0
        self.free_overrun = min(0, self.free_overrun)

    def cool(self) -> None:
        """Expect nobody: the next draw keeps only what runs."""
        self.rate = self._token_rate = self._overrun_rate = 0.0
        self._wanted_requests = self._wanted_tokens = self._wanted_overrun = 0
        self.is_hot = False
        self._drew_at_s = float("-inf")

    def _ask(self, tokens: int, requests: int, slots: int, overrun: int, now_s: float) -> DrawRequest:
        """Ask for so much to be free."""
        self._number += 1
        ask = DrawRequest(
            self._number,
            self.used_tokens,
            max(0, self.used_requests),
            self.promised_tokens + tokens,
            requests,
            self.live_slots + slots,
            self.promised_tokens,
            self.live_slots,
            self.promised_overrun + overrun,
            self.promised_overrun,
        )
        self._asked, self._drew_at_s = ask, now_s
        self.free_tokens = min(self.free_tokens, tokens)
        self.free_requests = min(self.free_requests, requests)
        self.free_slots = min(self.free_slots, slots)
        self.free_overrun = min(self.free_overrun, overrun)
        return ask

    def _is_due(self, now_s: float) -> bool:
        return now_s - self._drew_at_s >= RENEW_S

    def _answered(self) -> DrawRequest:
        ask, self._asked = self._asked, None
        assert ask is not None
        return ask

    def _measure(self, now_s: float) -> None:
        passed_s = now_s - self._seen_at_s
        if passed_s < AGAIN_S:
            return
        weight = 1.0 - 0.5 ** (passed_s / HALF_LIFE_S)
        self.rate += weight * (self._wanted_requests / passed_s - self.rate)
        self._token_rate += weight * (self._wanted_tokens / passed_s - self._token_rate)
        self._overrun_rate += weight * (self._wanted_overrun / passed_s - self._overrun_rate)
        self._wanted_requests = self._wanted_tokens = self._wanted_overrun = 0
        self._seen_at_s = now_s

    def _target(self) -> tuple[int, int, int, int]:
        """Return the tokens, requests, slots and open overrun that should be free."""
        self.is_hot = self.rate >= (HOT_PER_S / 2 if self.is_hot else HOT_PER_S)
        tokens_max, requests_max, slots_max, overrun_max = self._caps
        if not self.is_hot:
            return 0, 0, 0, 0
        needed = _REQUESTS_MIN * self._token_rate / self.rate
        beyond = _REQUESTS_MIN * self._overrun_rate / self.rate
        is_small = tokens_max < needed or requests_max < _REQUESTS_MIN or slots_max < _REQUESTS_MIN
        if is_small or overrun_max < beyond:
            self.is_hot = False
            return 0, 0, 0, 0
        requests = max(_REQUESTS_MIN, HORIZON_S * self.rate)
        tokens = min(tokens_max, max(needed, HORIZON_S * self._token_rate))
        overrun = min(overrun_max, max(beyond, HORIZON_S * self._overrun_rate))
        return int(tokens), int(min(requests_max, requests)), int(min(slots_max, requests)), int(overrun)
