"""The stored record of the mesh without its control plane, and of rolling drains. Pure."""

from __future__ import annotations

import msgspec


class Dead(msgspec.Struct, kw_only=True):
    """Every control process was dead, while other processes were restarted and Redis lost its data."""

    dead_s: float
    requests: int
    lost: int
    share_before: float
    """Share of the answers that the canary's pool gave."""
    share_after: float
    moved_sessions: int
    """Sessions that another pool than before served."""
    snapshot_before: str
    """Name of the snapshot that all receivers held."""
    snapshot_after: str
    deeds: list[str]
    """Restarts and losses meanwhile."""
    longest_pause_s: float
    """Longest wait of a client for its next message."""
    faults: list[str] = msgspec.field(default_factory=list)


class Canary(msgspec.Struct, kw_only=True):
    """The canary's pool was killed while no control process ran; later `kvmesh snapshot stable --direct`."""

    requests: int
    """Sent after the kill, by plain clients that see each refusal."""
    refused: int
    refused_s: float
    """From the kill to the last refusal; 0 without one."""
    sessions: int
    """Sessions of the canary among them."""
    first_token_s: float
    """Longest wait for the first token of a request of such a session."""
    bound: int
    """Requests that had begun at the canary before the kill, and ended with it."""
    direct_snapshot: str
    direct_requests: int
    """Requests behind `kvmesh snapshot stable --direct`, while the canary's pool serves again."""
    direct_lost: int
    direct_canary: int
    """Of them at the canary."""
    faults: list[str] = msgspec.field(default_factory=list)


class Drains(msgspec.Struct, kw_only=True):
    """Processes drained one after the other, by the control plane and by SIGTERM in turn."""

    by_control: int
    by_signal: int
    seconds: float
    requests: int
    lost: int
    longest_pause_s: float
    faults: list[str] = msgspec.field(default_factory=list)


class WithoutRecord(msgspec.Struct, kw_only=True):
    """One run of `make without-control`."""

    commit: str
    machine: str
    began: str
    """UTC, ISO 8601."""
    command: str
    seconds: float
    weight_percent: int
    dead: Dead
    canary: Canary
    drains: Drains

    @property
    def faults(self) -> list[str]:
        """Everything that must not have happened."""
        return [*self.drains.faults, *self.dead.faults, *self.canary.faults]
