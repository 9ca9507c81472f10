"""The states of the accounts that are known at a frontend: those with recent requests or with held tokens.

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
"""Time without requests after which an account is forgotten."""


class AccountStates:
    """The state of each account. `current_limits` learns their limits; `name(what)` returns a new unique name."""

    def __init__(self, current_limits: CurrentLimits, name: Callable[[str], str]) -> None:
        self._current_limits = current_limits
        self._name = name
        self._frontends = 1
        self._by_account: dict[Account, AccountState] = {}
        self._by_id: dict[int, tuple[Account, AccountState]] = {}
        """The same by `id` of the account, so that an admission need not compare accounts."""

    def __len__(self) -> int:
        return len(self._by_account)

    def __iter__(self) -> Iterator[AccountState]:
        return iter(self._by_account.values())

    def known(self, account: Account) -> AccountState | None:
        """Return the state of `account` if a request brought the same object before, else None."""
        known = self._by_id.get(id(account))
        return None if known is None else known[1]

    def of(self, account: Account, now_s: float) -> AccountState:
        """Return the state of `account`, which is known from now on."""
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
        """Return the organisations of the known accounts."""
        return {account.organisation for account in self._by_account}

    def resize(self, frontends: int) -> None:
        """Set the number of frontends that share the limits."""
        self._frontends = frontends
        for account_state in self:
            account_state.quota_lease.resize(account_state.account, frontends)

    def forget_idle(self, now_s: float) -> None:
        """Forget accounts that hold nothing and had no request for IDLE_S."""
        self._by_id.clear()
        for account_state in list(self):
            if account_state.is_idle and now_s - account_state.seen_at_s > IDLE_S:
                del self._by_account[account_state.account]
