"""Nested rate limits and concurrency limits: those of a key inside its tenant's, inside its organisation's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

ROUNDING: Final = 1e-9
"""Error of a product of two floats: 10 x 0.3 must not round up to 4."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one scope: rate limits as token buckets, concurrency, open overrun. 0: no limit of that kind."""

    requests_per_min: float = 0.0
    requests_burst: float = 0.0
    """Requests that may come at once after a pause; at least 1 if `requests_per_min` is set."""
    tokens_per_min: float = 0.0
    tokens_burst: float = 0.0
    """Tokens that may be reserved at once after a pause; a request that needs more can never be admitted."""
    concurrency: int = 0
    """Running requests."""
    tokens_overrun: float = 0.0
    """Open overrun: tokens that live requests may together still use beyond their reservations. Applies only if
    `tokens_per_min` is set."""

    @property
    def is_none(self) -> bool:
        """True if nothing is limited."""
        return not (self.requests_per_min or self.tokens_per_min or self.concurrency)

    def scaled(self, share: float) -> Limit:
        """Return the part of the limit that a region with this share enforces. `share`: above 0, at most 1.

        Rates are scaled. Bursts stay whole: a request above a scaled burst could never be admitted. Concurrency is rounded
        up, at least 1, because 0 would mean no limit.
        """
        return replace(
            self,
            requests_per_min=self.requests_per_min * share,
            tokens_per_min=self.tokens_per_min * share,
            concurrency=max(1, ceil(self.concurrency * share - ROUNDING)) if self.concurrency else 0,
        )


@dataclass(frozen=True, slots=True)
class Scope:
    """A name with its limit, for example "organisation:acme", "tenant:search" or "key:search-prod"."""

    name: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class Account:
    """The scopes that a request is charged to: of one organisation, outermost first, without those that have no limit."""

    organisation: str
    """Hash tag of all keys of the account in Redis."""
    scopes: tuple[Scope, ...]
    _hash: int = field(init=False, repr=False, compare=False)
    """Hash, computed once because every request needs it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.organisation, self.scopes)))

    def __hash__(self) -> int:
        return self._hash
