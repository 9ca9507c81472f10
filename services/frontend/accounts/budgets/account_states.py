"""The accounts that this frontend knows: those whose requests came of late, or hold something still.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvmesh.buckets.limits import Account
from services.frontend.accounts.budgets.account_state import AccountState
from services.frontend.accounts.budgets.current_limits import CurrentLimits
from services.frontend.accounts.budgets.quota_lease import QuotaLease

IDLE_S: Final = 60.0
"""An account that nobody used for so long is forgotten."""


class AccountStates:
    """What is known of each. `current_limits` learns the limits that hold; `name(what)` returns a new name."""

    def __init__(self, current_limits: CurrentLimits, name: Callable[[str], str]) -> None:
        self._current_limits = current_limits
        self._name = name
        self._frontends = 1
        self._by_account: dict[Account, AccountState] = {}
        self._by_id: dict[int, tuple[Account, AccountState]] = {}
        """The same by identity: comparing accounts costs more than admitting a request."""

    def __len__(self) -> int:
        return len(self._by_account)

    def __iter__(self) -> Iterator[AccountState]:
        return iter(self._by_account.values())

    def known(self, account: Account) -> AccountState | None:
        """Return what is known of `account`, if a request brought this very object before."""
        known = self._by_id.get(id(account))
        return None if known is None else known[1]

    def of(self, account: Account, now_s: float) -> AccountState:
        """Return what is known of `account`; from now on it is known."""
        known = self._by_id.get(id(account))
        if known is not None:
            return known[1]
        self._current_limits.see(account)
        account_state = self._by_account.get(account)
        if account_state is None:
            quota_lease = QuotaLease(self._name("quota_lease"), account, self._frontends, now_s)
            account_state = self._by_account[account] = AccountState(account, quota_lease, now_s)
        self._by_id[id(account)] = account, account_state
        return account_state

    def organisations(self) -> set[str]:
        """Return whose accounts they are."""
        return {account.organisation for account in self._by_account}

    def resize(self, frontends: int) -> None:
        """Take the number of frontends that share the limits."""
        self._frontends = frontends
        for account_state in self:
            account_state.quota_lease.resize(account_state.account, frontends)

    def forget_idle(self, now_s: float) -> None:
        """Drop those that hold nothing and were not used for IDLE_S."""
        self._by_id.clear()
        for account_state in list(self):
            if account_state.is_idle and now_s - account_state.seen_at_s > IDLE_S:
                del self._by_account[account_state.account]
