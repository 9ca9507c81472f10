"""The actions that the lives of replicas ask of the shell. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from controlplane.warmup.jobs import Job
from kvmesh.control.v1 import snapshot_pb2 as pb


@dataclass(frozen=True, slots=True)
class Order:
    """Tell one replica its state."""

    process_id: str
    boot_id: str
    order: pb.LifeOrder


@dataclass(frozen=True, slots=True)
class RunJob:
    """Run `job`, then call `on_result` with its number."""

    number: int
    job: Job


@dataclass(frozen=True, slots=True)
class CancelJob:
    """End a job. No result follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Told:
    """An event for the audit."""

    what: str
    target: str
    result: str


LifeAction: TypeAlias = Order | RunJob | CancelJob | Told
