"""Tenants as label values of metrics, with bounded cardinality. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

NAMES_MAX: Final = 64
"""Tenants with a label of their own. Each label adds its time series to every metric by tenant, at each frontend."""

OTHER: Final = "other"
ANONYMOUS: Final = "anonymous"


class Labels:
    """Maps tenants to labels: the first NAMES_MAX of the configuration to their names, all others to "other".

    Every frontend uses the same label for a tenant, so sums over frontends are correct.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: tenants in the order of the configuration."""
        self._labels = {"": ANONYMOUS, **{name: name for name in islice(names, NAMES_MAX)}}

    def of(self, tenant: str) -> str:
        """Return the label of `tenant`; the empty name is the anonymous tenant."""
        return self._labels.get(tenant, OTHER)
