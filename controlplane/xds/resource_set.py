"""Resources that callers of one region get, as bytes with versions. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.xds.schema import TYPE_PREFIX

CLUSTER: Final = f"{TYPE_PREFIX}envoy.config.cluster.v3.Cluster"
ENDPOINTS: Final = f"{TYPE_PREFIX}envoy.config.endpoint.v3.ClusterLoadAssignment"
LISTENER: Final = f"{TYPE_PREFIX}envoy.config.listener.v3.Listener"
ROUTES: Final = f"{TYPE_PREFIX}envoy.config.route.v3.RouteConfiguration"

TYPES: Final = (CLUSTER, ENDPOINTS, LISTENER, ROUTES)
"""Types in the order in which changes are sent: make before break (CDS, EDS, LDS, RDS)."""

VERSION_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """Serialized resources by type and name."""

    by_type: Mapping[str, Mapping[str, bytes]]

    def named(self, type_url: str, names: Iterable[str] | None) -> tuple[bytes, ...]:
        """Return the resources of a type with `names`, ordered by name. None: all. Missing ones are left out."""
        found = self.by_type.get(type_url, {})
        wanted = found.keys() if names is None else found.keys() & set(names)
        return tuple(found[name] for name in sorted(wanted))


def version_of(resources: Iterable[bytes]) -> str:
    """Return the version of `resources`: a digest, equal in all processes that serve the same."""
    digest = hashlib.sha256()
    for resource in resources:
        digest.update(len(resource).to_bytes(8, "big"))
        digest.update(resource)
    return digest.hexdigest()[:VERSION_DIGITS]
