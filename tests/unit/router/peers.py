"""Common parts of the scripted replicas: streams with delays and breaks, and the tokens they must send."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmesh import blocks
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.replicas import Replica

if TYPE_CHECKING:
    from tests.unit.router.world import World

BLOCK = 4
VERSION = "v1"
ORPHAN_S = 3.0


def token(request_id: str, position: int) -> int:
    """Return the only valid token at a position, the same in every attempt."""
    return zlib.crc32(f"{request_id}/{position}".encode()) >> 1


class Link:
    """A link of the router: the outbox, the wire, the peer. See kvmesh.attach.client.AttachLink."""

    def __init__(self, world: World, sink: Replica[Attempt], peer: Peer) -> None:
        self.world, self.sink, self.peer = world, sink, peer
        self.outbox = UpwardOutbox()
        self.down_outbox: DownwardOutbox | None = None
        self.upward: deque[pb.AttachRequest] = deque()
        self.downward: deque[pb.AttachResponse] = deque()
        sink.connect(self)

    def attach(self) -> None:
        if self.down_outbox is None and self.peer.is_alive:
            self.down_outbox = DownwardOutbox()
            self.peer.open(self)
            self.sink.on_attached(self, pb.Hello(process_id=self.peer.name), self.world.now_s)

    def cut(self) -> None:
        """Break the stream; some messages in transit still arrive before."""
        if self.down_outbox is not None:
            for _ in range(self.world.rng.randint(0, 3)):
                self.move()
            self.upward.clear()
            self.downward.clear()
            self.down_outbox = None
            self.peer.close(self)
        self.outbox = UpwardOutbox()
        self.sink.on_lost(self, "cut", self.world.now_s)

    def move(self) -> bool:
        """Let one random message move on the wire."""
        rng, now_s = self.world.rng, self.world.now_s
        if self.down_outbox is None:
            return False
        choices = []
        if self.outbox.waiting_bytes:
            choices.append("write up")
        if self.down_outbox.waiting_bytes:
            choices.append("write down")
        choices += ["read up"] * bool(self.upward) + ["read down"] * bool(self.downward)
        if not choices:
            return False
        choice = rng.choice(choices)
        if choice == "write up":
            if (request := self.outbox.take(now_s)) is not None:
                self.upward.append(pb.AttachRequest.FromString(request.SerializeToString()))
        elif choice == "write down":
            if (answer := self.down_outbox.take(now_s)) is not None:
                self.downward.append(pb.AttachResponse.FromString(answer.SerializeToString()))
        elif choice == "read up":
            self.peer.on_request(self, self.upward.popleft())
        else:
            self.sink.on_response(self, self.downward.popleft(), now_s)
        return True


@dataclass(eq=False)
class Run:
    """A slot at a fake replica."""

    submit: pb.Submit
    link: Link | None
    slot: int
    state: str
    end: int = 0
    sent: int = 0
    credit: int = 0
    expires_s: float = float("inf")


class Peer(ABC):
    """A fake prefill or decode replica."""

    role: Any = "decode"

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_alive = True
        self.runs: list[Run] = []
        self.last_slot: dict[int, int] = {}

    def open(self, link: Link) -> None:
        self.last_slot[id(link)] = 0
        self.report(link)

    def report(self, link: Link) -> None:
        assert link.down_outbox is not None
        reserved = sum(self.blocks(run) for run in self.runs if run.state in ("pending", "running"))
        link.down_outbox.load(
            pb.LoadReport(
                block_total_count=self.world.decode_blocks,
                block_free_count=max(0, self.world.decode_blocks - reserved),
                block_reserved_count=reserved,
                engine_ready=True,
            )
        )

    @staticmethod
    def blocks(run: Run) -> int:
        return blocks.count_for(len(run.submit.token_ids) // 4 + run.submit.budget.max_output_tokens, BLOCK)

    def find(self, link: Link, slot: int) -> Run | None:
        return next((run for run in self.runs if run.link is link and run.slot == slot), None)

    def check(self, link: Link, message: pb.AttachRequest) -> None:
        for submit in message.submits:
            assert submit.budget.remaining_ms > 0
        numbers = sorted([a.slot for a in message.adopts] + [s.slot for s in message.submits])
        for number in numbers:
            assert number > self.last_slot[id(link)], "a slot number was used twice"
            self.last_slot[id(link)] = number

    @abstractmethod
    def on_request(self, link: Link, message: pb.AttachRequest) -> None: ...

    @abstractmethod
    def close(self, link: Link) -> None: ...

    @abstractmethod
    def act(self) -> None: ...

    def expire(self) -> None:
        self.runs = [run for run in self.runs if run.expires_s > self.world.now_s]
