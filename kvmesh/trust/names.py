"""Names in certificates, and who may attach to whom. Pure.

A certificate of the mesh names the role of its process, not the process: `router.kvmesh.internal` for every router of the
mesh "kvmesh". Addresses change, and say nothing of what a process may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmesh.roles import SERVICES

OPERATOR: Final = "operator"
"""The operator: runs `kvmesh status`, `kvmesh health` and `kvmesh replay --cost-of` from outside the services."""

CERTIFICATE_ROLES: Final = (*SERVICES, OPERATOR)
"""Roles that may stand in a certificate of the mesh."""

MAY_ATTACH: Final[Mapping[str, tuple[str, ...]]] = {
    "router": ("frontend",),
    "prefill": ("router",),
    "decode": ("router",),
}
"""Role of a server -> roles that may open Attach there. Health and status are for every role of the mesh."""


def name_of(role: str, mesh: str) -> str:
    """Return the name that stands as a DNS name in the certificates of `role` in `mesh`."""
    return f"{role}.{mesh}.internal"
