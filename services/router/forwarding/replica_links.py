"""The links to all prefill and decode replicas: opened when one registers, closed when it is gone.

A shell. A lost lease alone closes nothing: it masks the replica for new placements while its stream lives on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import grpc

from kvmesh.attach.client import AttachLink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from kvmesh.tasks import end
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replicas import Replica

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
GONE_S: Final = 5.0
"""A replica without lease whose stream is down this long is forgotten, its cache too."""


@dataclass(slots=True)
class Linked:
    """A replica's process, its stream and the task that keeps it."""

    replica: Replica[Attempt]
    boot_id: str
    link: AttachLink
    task: asyncio.Task[None]


class ReplicaLinks:
    """One kept link per replica's process. Owned by who calls `run`, inside which all links live.

    `update` may be called at any time, also before `run`. `on_replicas` gets the names whenever they change.
    """

    def __init__(
        self,
        relay: ForwardingCore,
        hello: pb.Hello,
        model_version: str,
        block_tokens: int,
        clock: Clock,
        open_channel: Callable[[str, str], grpc.aio.Channel],
        on_replicas: Callable[[list[str]], None],
        explain: Callable[[str, str], Awaitable[str]] | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        """`open_channel` and `explain` get the address of a replica and its role."""
        self._relay = relay
        self._hello = hello
        self._model_version = model_version
        self._block_tokens = block_tokens
        self._clock = clock
        self._open_channel = open_channel
        self._explain = explain
        self._dialer = dialer or Dialer(clock)
        self._on_replicas = on_replicas
        self._wanted: dict[str, Member] = {}
        self._linked: dict[str, Linked] = {}
        self._retired: list[Linked] = []
        """Processes whose name a newer one has; each is closed once nothing runs there."""
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._linked)

    def is_settled(self) -> bool:
        """True if every replica that is wanted has a link."""
        return all(name in self._linked for name in self._wanted)

    def update(self, members: Iterable[Member]) -> None:
        """Take the members of the mesh; replicas of another model version are left out."""
        self._wanted = {member.process_id: member for member in members if self._is_wanted(member)}
        for name, linked in self._linked.items():
            member = self._wanted.get(name)
            linked.replica.is_listed = member is not None
            if member is not None and member.boot_id == linked.boot_id:
                linked.replica.is_draining = member.draining
        self._changed.set()

    async def run(self) -> None:
        """Open and close links until cancelled; then close all."""
        try:
            while True:
                self._changed.clear()
                try:
                    self._settle()
                except Exception:  # a bug with one replica must not end the process, and every stream with it
                    log.exception("the links cannot be brought in line with the members")
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            everybody = [*self._linked.values(), *self._retired]
            await end((*(linked.task for linked in everybody), *self._closing))

    def _is_wanted(self, member: Member) -> bool:
        return (
            member.role in ("prefill", "decode")
            and member.model_version == self._model_version
            and member.block_tokens == self._block_tokens
        )

    def _settle(self) -> None:
        """Bring the links in line with the members."""
        now_s = self._clock.now_s()
        names = set(self._linked)
        for name, linked in list(self._linked.items()):
            member = self._wanted.get(name)
            if member is not None and member.boot_id != linked.boot_id:
                self._relay.retire_replica(linked.replica)
                self._retired.append(self._linked.pop(name))
            elif member is None and self._is_down(linked, now_s, GONE_S):
                self._close(self._linked.pop(name), now_s)
        for linked in list(self._retired):
            # A living process that has lost its name keeps its stream as long as it has something of ours.
            if self._is_down(linked, now_s, 0.0) or _is_unused(linked):
                self._retired.remove(linked)
                self._close(linked, now_s)
        for name, member in self._wanted.items():
            if name not in self._linked:
                self._linked[name] = self._open(member)
        if set(self._linked) != names:
            self._on_replicas(sorted(self._linked))
        self._relay.after_event(now_s)

    @staticmethod
    def _is_down(linked: Linked, now_s: float, for_s: float) -> bool:
        since_s = linked.replica.down_since_s
        return not linked.link.is_up and since_s is not None and now_s - since_s >= for_s

    def _open(self, member: Member) -> Linked:
        role: Literal["prefill", "decode"] = "prefill" if member.role == "prefill" else "decode"
        replica = self._relay.add_replica(
            member.process_id, role, address=member.address, kv_address=member.kv_address
        )
        replica.is_draining = member.draining
        link = AttachLink(
            member.process_id,
            member.address,
            self._hello,
            replica,
            self._clock,
            lambda address: self._open_channel(address, role),
            keep=True,
            expected_process=member.process_id,
            expected_boot=member.boot_id,
            explain=self._explaining(role),
            dialer=self._dialer,
        )
        replica.connect(link)
        task = asyncio.create_task(link.run(), name=f"replica-link:{member.process_id}")
        log.info("replica found", extra={"replica": member.process_id, "address": member.address})
        return Linked(replica, member.boot_id, link, task)

    def _explaining(self, role: str) -> Callable[[str], Awaitable[str]] | None:
        explain = self._explain
        return None if explain is None else lambda address: explain(address, role)

    def _close(self, linked: Linked, now_s: float) -> None:
        """Its stream is down or unused: nothing is lost by ending the task."""
        linked.task.cancel()
        self._closing.add(linked.task)
        linked.task.add_done_callback(self._closing.discard)
        self._relay.remove_replica(linked.replica, now_s)
        log.info("replica gone", extra={"replica": linked.replica.name, "address": linked.link.address})


def _is_unused(linked: Linked) -> bool:
    return not linked.replica.slots and not linked.link.outbox.waiting_bytes
