"""Limits that nest: a key's within its tenant's within its organisation's.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limit:
    """What one scope may use. 0: no limit of that kind."""

    requests_per_min: float = 0.0
    requests_burst: float = 0.0
    """Requests that may come at once after a pause; at least 1 where `requests_per_min` is set."""
    tokens_per_min: float = 0.0
    tokens_burst: float = 0.0
    """Tokens that may be reserved at once after a pause; a request that needs more can never be admitted."""
    concurrency: int = 0
    """Requests at a time."""
    tokens_overrun: float = 0.0
    """Open overrun: tokens that live requests may together still use beyond what is reserved for them. Counts where
    `tokens_per_min` is set."""

    @property
    def is_none(self) -> bool:
        """True if nothing is limited."""
        return not (self.requests_per_min or self.tokens_per_min or self.concurrency)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose limit: "organisation:acme", "tenant:search" or "key:search-prod"."""

    name: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class Account:
    """Who pays for a request: all scopes of one organisation, outermost first. Scopes without limits are left out."""

    organisation: str
    """Hash tag of all keys in Redis."""
    scopes: tuple[Scope, ...]
    _hash: int = field(init=False, repr=False, compare=False)
    """Reckoned once: it is asked for with every request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.organisation, self.scopes)))

    def __hash__(self) -> int:
        return self._hash
