"""The receivers of snapshots as one leader hears them. Pure.

A receiver opens its stream with a hello, and sends at least a heartbeat. `rollouts.view` says when a frontend is silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.published import NO_NAME, NO_TERM, Name, Term

RECEIVERS_MAX: Final = 4096
"""Receivers that are remembered. Beyond it, the longest gone are forgotten."""

FORGET_S: Final = 300.0
"""A receiver without lease and stream is forgotten after this time."""


@dataclass(slots=True)
class Receiver:
    """One receiver."""

    process_id: str
    boot_id: str
    role: str
    pool: str
    capabilities: frozenset[str] = frozenset()
    model_versions: frozenset[str] = frozenset()
    applied: Name = NO_NAME
    highest_term: Term = NO_TERM
    rejected: Name = NO_NAME
    rejection: str = ""
    """Reason of the last refusal. Empty after it applied a later snapshot."""
    report: pb.ReceiverReport | None = None
    """Its last report. None: it has sent none on this stream."""
    heard_s: float = float("-inf")
    is_connected: bool = False


class Receivers:
    """All receivers by process id. A new boot of a process replaces the earlier one."""

    def __init__(self) -> None:
        self._by_name: dict[str, Receiver] = {}
        self.frontends: dict[str, float] = {}
        """Frontends with a lease: the time since which it is seen."""
        self.nacks_total = 0

    def __iter__(self) -> Iterator[Receiver]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, process_id: str, boot_id: str) -> Receiver | None:
        """Return the receiver if that boot is the known one."""
        found = self._by_name.get(process_id)
        return found if found is not None and found.boot_id == boot_id else None

    def named(self, process_id: str) -> Receiver | None:
        """Return the receiver of that name, of any boot."""
        return self._by_name.get(process_id)

    def hello(self, receiver: Receiver, now_s: float) -> None:
        """Add a receiver that opened its stream."""
        receiver.heard_s, receiver.is_connected = now_s, True
        self._by_name[receiver.process_id] = receiver
        if len(self._by_name) > RECEIVERS_MAX:
            gone = [each for each in self._by_name.values() if not each.is_connected]
            for each in sorted(gone, key=lambda each: each.heard_s)[: len(self._by_name) - RECEIVERS_MAX]:
                del self._by_name[each.process_id]

    def applied(self, receiver: Receiver, name: Name, now_s: float) -> None:
        """Take an acknowledgement."""
        receiver.heard_s = now_s
        if name.order >= receiver.applied.order:
            receiver.applied, receiver.rejection = name, ""

    def rejects(self, receiver: Receiver, name: Name, reason: str, now_s: float) -> None:
        """Take a refusal."""
        receiver.heard_s = now_s
        receiver.rejected, receiver.rejection = name, reason or "no reason was given"
        self.nacks_total += 1

    def gone(self, process_id: str, boot_id: str) -> None:
        """Note that a stream ended."""
        found = self.get(process_id, boot_id)
        if found is not None:
            found.is_connected = False

    def forget_all(self) -> None:
        """Forget everything that a former term heard."""
        self._by_name.clear()

    def list_members(self, members: Iterable[Member], now_s: float) -> None:
        """Take the leases. A receiver without lease and stream is forgotten after FORGET_S."""
        leased = {member.process_id: member.role for member in members}
        names = [name for name, role in leased.items() if role == "frontend"]
        self.frontends = {name: self.frontends.get(name, now_s) for name in names}
        for name, receiver in list(self._by_name.items()):
            is_old = not receiver.is_connected and now_s - receiver.heard_s >= FORGET_S
            if is_old and name not in leased:
                del self._by_name[name]
