"""What a call's trailing metadata tells of the budget that is left: on success as on refusal.

Pure. The smallest over the caller's scopes; what is not limited is not told.
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
"""Requests that may run beside those that do."""


class Left(Protocol):
    """What is left; None: not limited. A `RemainingBudget` of kvmesh.buckets is one."""

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
