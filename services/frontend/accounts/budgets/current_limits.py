"""The current limits of scopes, for reservations that were made under earlier ones.

Pure. A limit may change while requests run. Every operation refills the levels at the rates that it carries. A settlement
with an earlier, higher limit would refill them too fast for all requests of the scope. So each operation carries the
current limits.
"""

from __future__ import annotations

from kvmesh.buckets.limits import Account, Limit, Scope


class CurrentLimits:
    """The newest known limit of each scope."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change of a limit."""
        self._limits: dict[tuple[str, str], Limit] = {}

    def see(self, account: Account) -> None:
        """Take the limits of `account`, which a new request brings, as the current ones."""
        for scope in account.scopes:
            key = account.organisation, scope.name
            if self._limits.get(key) != scope.limit:
                self._limits[key] = scope.limit
                self.version += 1

    def of(self, account: Account) -> Account:
        """Return `account` with the current limits; the same object if they are its own."""
        organisation, limits = account.organisation, self._limits
        current = Account(
            organisation,
            tuple(
                Scope(scope.name, limits.get((organisation, scope.name), scope.limit))
                for scope in account.scopes
            ),
        )
        return account if current == account else current
