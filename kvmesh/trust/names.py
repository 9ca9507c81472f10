"""Names in certificates, and the roles that may attach to each role. Pure.

A certificate of the mesh names the role of its process, not the process: `router.kvmesh.internal` for every router of the
mesh "kvmesh". Addresses change, and they do not identify permissions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmesh.roles import SERVICES

OPERATOR: Final = "operator"
"""The operator: runs `kvmesh status`, `kvmesh health` and `kvmesh replay --cost-of` from outside the services."""

CERTIFICATE_ROLES: Final = (*SERVICES, OPERATOR)
"""Roles that a certificate of the mesh may name."""

MAY_ATTACH: Final[Mapping[str, tuple[str, ...]]] = {
    "router": ("frontend",),
    "prefill": ("router",),
    "decode": ("router",),
}
"""Role of a server -> roles that may open Attach there. Health and status are for every role of the mesh."""


def name_of(role: str, mesh: str) -> str:
    """Return the DNS name in the certificates of `role` in `mesh`."""
    return f"{role}.{mesh}.internal"
