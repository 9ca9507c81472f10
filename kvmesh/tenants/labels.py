"""Tenants in metrics: however many there are, metrics know few.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

NAMES_MAX: Final = 64
"""Tenants that have a label of their own: each of them costs every metric a time series in every frontend."""

OTHER: Final = "other"
ANONYMOUS: Final = "anonymous"


class Labels:
    """Maps tenants to labels: the first NAMES_MAX of the configuration to themselves, all others to "other".

    So every frontend calls a tenant the same, and what is added up over frontends is one tenant's.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: tenants in the order of the configuration."""
        self._labels = {"": ANONYMOUS, **{name: name for name in islice(names, NAMES_MAX)}}

    def of(self, tenant: str) -> str:
        """Return the label of `tenant`; the empty name is the anonymous tenant's."""
        return self._labels.get(tenant, OTHER)
