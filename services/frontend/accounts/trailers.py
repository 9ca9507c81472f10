"""Trailers of a call with the remaining budget, on success and on refusal.

Pure. Each value is the minimum over the caller's scopes. Kinds without a limit send no trailer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

REQUESTS: Final = "kvmesh-remaining-requests"
"""Requests that may start now."""

TOKENS: Final = "kvmesh-remaining-tokens"
"""Tokens that may be reserved now; 0 while a debt is being paid back."""

CONCURRENCY: Final = "kvmesh-remaining-concurrency"
"""Requests that may run beside the running ones."""


class Left(Protocol):
    """A remaining budget; None: no limit. Implemented by `RemainingBudget` of kvmesh.buckets."""

    @property
    def requests(self) -> float | None: ...

    @property
    def tokens(self) -> float | None: ...

    @property
    def concurrency(self) -> int | None: ...


def of_remaining(left: Left | None) -> Mapping[str, str]:
    """Return the trailers for `left`: whole numbers, rounded down."""
    if left is None:
        return {}
    told = {}
    if left.requests is not None:
        told[REQUESTS] = str(max(0, math.floor(left.requests)))
    if left.tokens is not None:
        told[TOKENS] = str(max(0, math.floor(left.tokens)))
    if left.concurrency is not None:
        told[CONCURRENCY] = str(max(0, left.concurrency))
    return told
