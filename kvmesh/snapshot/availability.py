"""Whether the control plane lets a process take new requests. Pure."""

from __future__ import annotations

from enum import Enum

from kvmesh.snapshot.content import Content


class Availability(Enum):
    """Availability of one boot of a process under a snapshot. The lease shows the value as `state`."""

    SERVING = "serving"
    CORDONED = "cordoned"
    """Callers place nothing new on the process; it refuses nothing."""
    DRAINING = "draining"
    """The process refuses new requests and finishes the others, as after SIGTERM. It does not exit."""


def availability_of(content: Content, process_id: str, boot_id: str) -> tuple[Availability, str]:
    """Return the availability of a boot of a process, and the reason for people."""
    cordon = content.cordon_of(process_id, boot_id)
    if cordon is None:
        return Availability.SERVING, ""
    state = Availability.DRAINING if cordon.is_draining else Availability.CORDONED
    why = f": {cordon.reason}" if cordon.reason else ""
    return state, f"{state.value} by the control plane{why}"
