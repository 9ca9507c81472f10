"""Side facts about replicas, each an event with the time at which the leader learned of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from controlplane.rollouts.judge.observation import Track


@dataclass(frozen=True, slots=True)
class ReplicaBoot:
    """A replica has started."""

    track: Track
    replica: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Ejection:
    """A router or a frontend has ejected a replica as an outlier."""

    track: Track
    replica: str
    at_s: float


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a replica's processes. Leave out readings that span a restart: a restart begins a new replica name."""

    track: Track
    replica: str
    role: str
    """Replicas are compared within a role."""
    memory_bytes: int
    at_s: float


Event: TypeAlias = ReplicaBoot | Ejection | MemoryReading
