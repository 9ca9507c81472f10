"""Tokens that a frontend's copies may use: leases of the shadow's ceiling, which Redis keeps for the mesh. Pure.

A copy takes the most that it may use before it is sent, and gives the rest back at its end. INVARIANT: the tokens that all
copies of the mesh used are at most those that Redis granted, and those are at most the ceiling. Without an answer of Redis
nothing is granted (fail-closed). A lease counts as used if its answer is lost, or if its frontend dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

LEASE_TOKENS: Final = 16_384
"""Size of a lease, unless the ceiling or a copy needs another one."""

CEILING_PARTS: Final = 32
"""A lease is at most this part of the ceiling, so that one frontend cannot hold much of it unused."""

FINAL_PARTS: Final = 8
"""A refusal is final once at most this part of the ceiling is left. Before that, only the refused copy is too large."""

RETRY_S: Final = 1.0
"""Pause after a call without an answer."""

MINUTE_S: Final = 2.0
"""Pause after a refusal by the ceiling of a minute. Redis alone knows when the minute ends."""

IDLE_S: Final = 10.0
"""Time after which an unused lease is given back."""


class Grant(Enum):
    """Answer to a copy that needs tokens."""

    TAKEN = auto()
    WAIT = auto()
    """A lease is asked for."""
    MINUTE = auto()
    """The ceiling of the minute is reached."""
    CEILING = auto()
    """The ceiling is reached. Final."""
    TOO_LARGE = auto()
    """The copy needs more than is left, and smaller ones may fit."""
    NO_REDIS = auto()


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One call of Redis."""

    least: int
    """Tokens below which a lease is of no use. 0: tokens are only given back."""
    most: int
    returned: int
    """Unused tokens that are given back."""


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Answer of Redis."""

    granted: int
    total: int
    """Tokens that the mesh has taken and not given back."""
    is_minute: bool = False
    """True if the ceiling of the minute refused the lease."""


class TokenLedger:
    """See the module. One call at a time is under way."""

    def __init__(self, token_max: int) -> None:
        self.total = 0
        """Tokens that the mesh has taken, as Redis told last."""
        self.balance = 0
        """Granted tokens that no copy has."""
        self.held = 0
        """Tokens that running copies hold."""
        self.used = 0
        """Tokens that ended copies used."""
        self._token_max = token_max
        self._too_large = 0
        """Tokens of the smallest copy that was too large. 0: none was."""
        self._lease = max(1, min(LEASE_TOKENS, token_max // CEILING_PARTS))
        self._wanted = 0
        self._asked: LeaseRequest | None = None
        self._pause_until_s = float("-inf")
        self._refusal = Grant.WAIT
        self._used_s = float("-inf")
        """Time at which a copy last took tokens."""
        self._is_closed = False

    def take(self, tokens: int, now_s: float) -> Grant:
        """Take the tokens of one copy, or ask for a lease."""
        if self._refusal is Grant.CEILING or self._is_closed:
            return Grant.CEILING
        if tokens <= self.balance:
            self.balance -= tokens
            self.held += tokens
            self._used_s = now_s
            return Grant.TAKEN
        if 0 < self._too_large <= tokens:
            return Grant.TOO_LARGE
        self._wanted = tokens
        return self._refusal if now_s < self._pause_until_s else Grant.WAIT

    def give_back(self, taken: int, used: int) -> None:
        """End a copy that took `taken` tokens and used `used` of them."""
        used = min(taken, used)
        self.held -= taken
        self.used += used
        self.balance += taken - used

    def close(self) -> None:
        """Take nothing more: the shadow is over. Unused tokens are given back."""
        self._is_closed, self._wanted = True, 0

    def request(self, now_s: float) -> LeaseRequest | None:
        """Return the call to make now, or None. `on_answer` must follow."""
        if self._asked is not None or now_s < self._pause_until_s:
            return None
        is_unused = self._is_closed or now_s - self._used_s >= IDLE_S
        if self._wanted:
            least = self._wanted - self.balance
            self._asked = LeaseRequest(least, max(least, self._lease), 0)
        elif self.balance and is_unused:
            self._asked = LeaseRequest(0, 0, self.balance)
            self.balance = 0
        return self._asked

    def on_answer(self, answer: LeaseAnswer | None, now_s: float) -> None:
        """Take the answer to the last request. None: Redis did not answer, and may have granted the lease."""
        asked, self._asked = self._asked, None
        assert asked is not None, "an answer without a request"
        if answer is None:
            self._refusal, self._pause_until_s = Grant.NO_REDIS, now_s + RETRY_S
            return
        self.total = answer.total
        self._refusal = Grant.WAIT
        if not asked.least:
            return
        wanted, self._wanted = self._wanted, 0
        if answer.granted >= asked.least:
            self.balance += answer.granted
            self._used_s = now_s
        elif answer.is_minute:
            self._refusal, self._pause_until_s = Grant.MINUTE, now_s + MINUTE_S
        elif self._token_max - answer.total > self._token_max // FINAL_PARTS:
            self._too_large = wanted
        else:
            self._refusal = Grant.CEILING

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is out of range."""
        assert self.balance >= 0 and self.held >= 0 and self.used >= 0, (self.balance, self.held, self.used)
