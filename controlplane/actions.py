"""The actions that the core asks of its shell. Each is idempotent or carries what makes it so. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from controlplane.rollouts.golden_schedule import GoldenRun
from controlplane.warmup.actions import CancelJob, Order, RunJob
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.published import Published


class DocumentKind(Enum):
    """Kind of a document in Redis."""

    ROLLOUT = "rollout"
    DESIRED = "desired"
    SHADOW = "shadow"


class AidKind(Enum):
    """Kind of a stored aid of warm-ups. Losing one costs a slower warm-up, and nothing else."""

    PACKAGE = "packages"
    PREFIX = "prefixes"


@dataclass(frozen=True, slots=True)
class ClaimLease:
    """Claim or renew the leader's lease, then call `on_lease`."""

    number: int
    """Number of the term to store; 0: none."""


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Give the lease back, at a graceful shutdown."""


@dataclass(frozen=True, slots=True)
class ReadStore:
    """Read the documents, the board and the term, then call `on_store`."""


@dataclass(frozen=True, slots=True)
class WriteDocument:
    """Write a document by compare-and-set, then call `on_written` with `number`."""

    kind: DocumentKind
    name: str
    """Id of the rollout or shadow; empty for the desired document."""
    data: bytes
    revision: int
    """Revision of `data`."""
    replaces: int
    """Revision that Redis must have; 0: none. A higher one is a conflict."""
    number: int = 0
    """Number of the write; 0: its result decides nothing."""


@dataclass(frozen=True, slots=True)
class WriteAid:
    """Write a package or a registered prefix, unless Redis has its revision. No result follows: the next read shows it."""

    kind: AidKind
    name: str
    data: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class WriteBoard:
    """Write the snapshot to Redis, unless a higher one is there."""

    snapshot: Published


@dataclass(frozen=True, slots=True)
class Send:
    """Send the snapshot to one receiver."""

    process_id: str
    boot_id: str
    snapshot: Published


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell a frontend that its observations up to `sequence` are stored."""

    process_id: str
    boot_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Steer:
    """Tell a frontend its spill shares, or a router its part of the grants."""

    process_id: str
    boot_id: str
    traffic: pb.RegionTraffic


RunGolden: TypeAlias = GoldenRun
"""Run golden prompts on one replica, then hand the answers to the schedule that asked for them."""


@dataclass(frozen=True, slots=True)
class AppendEvent:
    """Append an entry to the audit stream and to the log."""

    what: str
    """For example "rollout.start"."""
    target: str
    """Rollout, process or snapshot."""
    result: str
    by: str = ""
    """Name in the operator's certificate. Empty: the control plane itself."""
    source: str = ""
    """Address of the operator."""
    details: dict[str, str] = field(default_factory=dict)
    """Values before and after, and the reason."""


@dataclass(frozen=True, slots=True)
class Done:
    """The command of `ticket` is decided. Empty `error`: it is in force."""

    ticket: int
    error: str = ""


Action: TypeAlias = (
    ClaimLease
    | ReleaseLease
    | ReadStore
    | WriteDocument
    | WriteBoard
    | WriteAid
    | Send
    | Confirm
    | Steer
    | RunGolden
    | AppendEvent
    | Done
    | Order
    | RunJob
    | CancelJob
)
