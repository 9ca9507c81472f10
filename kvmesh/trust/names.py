"""Names in certificates, and the roles that may attach to each role. Pure.

A certificate of the mesh names the role of its process, not the process: `router.kvmesh.internal` for every router of the
mesh "kvmesh". Addresses change, and they do not identify permissions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmesh.roles import CONTROL, RECEIVERS, SERVERS

OPERATOR: Final = "operator"
"""The operator: runs the commands of `kvmesh` that call processes, from outside the services."""

CERTIFICATE_ROLES: Final = (*SERVERS, OPERATOR)
"""Roles that a certificate of the mesh may name."""

ATTACH: Final = "/kvmesh.attach.v1.AttachService/Attach"
WATCH: Final = "/kvmesh.control.v1.SnapshotService/Watch"
HOT_PREFIXES: Final = "/kvmesh.router.v1.RouterService/ListHotPrefixes"
CONTROL_PLANE: Final = "/kvmesh.control.v1.ControlPlaneService/"
WARM_UPS: Final = "/kvmesh.control.v1.WarmUpService/"
SHADOWS: Final = "/kvmesh.control.v1.ShadowService/"
REGIONS: Final = "/kvmesh.control.v1.RegionService/"
FEDERATE: Final = f"{REGIONS}Federate"

MAY_ATTACH: Final[Mapping[str, tuple[str, ...]]] = {
    "router": ("frontend",),
    "prefill": ("router", CONTROL),
    "decode": ("router", CONTROL),
}
"""Role of a server -> roles that may open Attach there. Health and status are for every role of the mesh."""

MAY_CHANGE: Final = (OPERATOR, CONTROL)
"""Roles that may change the mesh by a call of the control plane."""

CONTROL_READS: Final = frozenset(
    {
        "GetControlPlane",
        "GetRollout",
        "ListRollouts",
        "WatchRollout",
        "GetSnapshot",
        "ListSnapshots",
        "ListReceivers",
        "ListLives",
        "ListProfiles",
        "ListPrefixes",
        "GetShadow",
        "ListRegions",
    }
)
"""Calls of the control plane that change nothing. Every other one of its services for operators counts as a change."""


def name_of(role: str, mesh: str) -> str:
    """Return the DNS name by which peers recognize a process of `role` in `mesh`."""
    return f"{role}.{mesh}.internal"


def names_of(role: str, mesh: str) -> tuple[str, ...]:
    """Return the DNS names in the certificates of `role`, the one of `name_of` first.

    A certificate of `control` also names the operator, because release 0.1.0 does not know the role `control`.
    """
    roles = (role, OPERATOR) if role == CONTROL else (role,)
    return tuple(name_of(one, mesh) for one in roles)


def is_change(method: str) -> bool:
    """True if `method`, the full name of a call, changes the mesh through the control plane."""
    service, name = method[: method.rfind("/") + 1], method[method.rfind("/") + 1 :]
    return service in (CONTROL_PLANE, WARM_UPS, SHADOWS, REGIONS) and name not in CONTROL_READS


def callers_of(role: str, method: str) -> tuple[str, ...]:
    """Return the roles that may call `method` at a process of `role`."""
    if method == ATTACH:
        return MAY_ATTACH.get(role, ())
    if method == WATCH:
        return RECEIVERS
    if method == FEDERATE:  # its news have the secrets of resume tokens
        return (CONTROL,)
    if method == HOT_PREFIXES:  # its answer has tokens of users
        return (CONTROL,)
    return MAY_CHANGE if is_change(method) else CERTIFICATE_ROLES
