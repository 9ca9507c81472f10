"""The limits that hold now, for reservations that were made under others.

Pure. A limit may change while requests run. What Redis is told of those must go by the new one: every operation fills the
levels at the rates that it brings, so that settlements by a limit that was lowered would fill them for everybody.
"""

from __future__ import annotations

from kvmesh.buckets.limits import Account, Limit, Scope


class CurrentLimits:
    """The newest limit of each scope that was seen, as many as there are scopes."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change."""
        self._limits: dict[tuple[str, str], Limit] = {}

    def see(self, account: Account) -> None:
        """A request comes with `account`: these limits hold."""
        for scope in account.scopes:
            key = account.organisation, scope.name
            if self._limits.get(key) != scope.limit:
                self._limits[key] = scope.limit
                self.version += 1

    def of(self, account: Account) -> Account:
        """Return `account` with the limits that hold; itself where they are its own."""
        organisation, limits = account.organisation, self._limits
        current = Account(
            organisation,
            tuple(
                Scope(scope.name, limits.get((organisation, scope.name), scope.limit))
                for scope in account.scopes
            ),
        )
        return account if current == account else current
