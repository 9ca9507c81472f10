"""The local fallback of budgets (fail-open): the outage, its local buckets, and the accounts that they know.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.errors import MeshError
from services.frontend.accounts.budgets.account_state import AccountState, Reservation
from services.frontend.accounts.budgets.local_buckets import LocalBuckets, Outage
from services.frontend.accounts.budgets.refusals import denied_error, shed_error, unavailable_error


class LocalFallback:
    """Admits locally between `begin` and `end`. Outside of an outage its methods change nothing."""

    def __init__(self) -> None:
        self.outage = Outage()
        self.is_on = False
        self._frontends = 1
        self._rank = 0
        self._local = LocalBuckets(1)
        self._opened: set[AccountState] = set()
        """Accounts with local buckets."""

    def resize(self, frontends: int, rank: int) -> None:
        """Set the number of frontends that share the limits, and the rank of this one among them."""
        self._frontends, self._rank = frontends, rank
        self._local.resize(frontends, rank)

    def begin(self, account_states: Iterable[AccountState], now_s: float) -> None:
        """Begin the outage: Redis is unavailable. May be called again during the outage."""
        self.outage.lose(now_s)
        if self.is_on:
            return
        self.is_on = True
        self._local = LocalBuckets(self._frontends, self._rank)
        for account_state in account_states:
            if account_state.live:
                self._open(account_state, now_s)

    def end(self) -> None:
        """End the outage: Redis is asked again."""
        self.outage.end()
        self.is_on = False
        self._opened.clear()

    def shed(self, reservation: Reservation, now_s: float) -> MeshError | None:
        """Return the error if the request's class is not served now (load shedding), else None."""
        if reservation.is_forced or not reservation.caller.service_class.is_sheddable:
            return None
        account_state = reservation.account_state
        if account_state is None or not (self.is_on and self.outage.is_shedding(now_s)):
            return None
        self._open(account_state, now_s)
        return shed_error(account_state.account, self._local.remaining(account_state.account))

    def admit(self, reservation: Reservation, now_s: float) -> MeshError | None:
        """Reserve all that the request may use in the local buckets, or return the error. Only Redis admits overrun."""
        account_state = reservation.account_state
        assert account_state is not None and self.is_on
        error = self.shed(reservation, now_s)
        if error is not None:
            return error
        self._open(account_state, now_s)
        account, tokens = account_state.account, reservation.max_tokens
        fits = self._local.largest(account)
        if tokens > fits and not reservation.is_forced:
            return unavailable_error(account, tokens, fits, self._local.remaining(account))
        denied = self._local.admit(account, tokens, now_s, is_forced=reservation.is_forced)
        if denied is None:
            reservation.tokens = tokens
            return None
        return denied_error(account, account_state.timed(denied, now_s, self._frontends), tokens)

    def hold(self, account_state: AccountState) -> None:
        """Count a running request that was not admitted locally."""
        if self.is_on and account_state in self._opened:
            self._local.hold(account_state.account)

    def release(self, account_state: AccountState) -> None:
        """Count a request that has ended."""
        if self.is_on and account_state in self._opened:
            self._local.release(account_state.account)

    def give_back(self, account_state: AccountState, tokens: int, requests: int, now_s: float) -> None:
        """Return unused tokens and requests to the local buckets. Tokens below 0 are taken from them."""
        if self.is_on and account_state in self._opened:
            self._local.give_back(account_state.account, tokens, requests, now_s)

    def _open(self, account_state: AccountState, now_s: float) -> None:
        if account_state not in self._opened:
            self._opened.add(account_state)
            age_s = now_s - account_state.remaining_at_s
            self._local.open(
                account_state.account, account_state.last_remaining, age_s, account_state.live, now_s
            )
