"""A scripted frontend: its requests, and a stream that checks every token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.peers import token

if TYPE_CHECKING:
    from tests.unit.router.world import World


@dataclass(eq=False)
class Request:
    """One request of the fake frontend, and its state."""

    request_id: str
    prompt: bytes
    output_tokens: int
    attempt: int = 0
    received: int = 0
    """Tokens received: positions [0, received)."""
    decode: str = ""
    stream: Stream | None = None
    slot: int = 0
    state: str = "idle"
    failures: list[str] = field(default_factory=list)
    region: str = ""
    """Home region of the caller, as its budget says."""


class Stream:
    """A frontend's stream to the router."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outbox = UpwardOutbox()
        self.down_outbox = DownwardOutbox()
        self.session = world.core.open_session(pb.Hello(process_id="frontend"), self.down_outbox, world.now_s)
        self.upward: deque[pb.AttachRequest] = deque()
        self.downward: deque[pb.AttachResponse] = deque()
        self.requests: dict[int, Request] = {}

    def move(self) -> bool:
        now_s, rng = self.world.now_s, self.world.rng
        choices = ["write up"] * bool(self.outbox.waiting_bytes)
        choices += ["write down"] * bool(self.down_outbox.waiting_bytes)
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
            self.session.on_request(self.upward.popleft(), now_s)
            self.world.core.after_event()
        else:
            self.on_response(self.downward.popleft())
        return True

    def cut(self) -> None:
        for _ in range(self.world.rng.randint(0, 3)):
            self.move()
        self.world.streams.remove(self)
        self.session.on_closed(self.world.now_s)
        for request in self.requests.values():
            request.stream, request.state = None, "lost"

    def on_response(self, message: pb.AttachResponse) -> None:
        requests = self.requests
        for placement in message.placements:
            if placement.slot in requests:
                requests[placement.slot].decode = placement.decode_replica
        for first in message.first_tokens:
            assert not first.context_phase_params, "the handoff is none of a frontend's business"
            if (request := requests.get(first.slot)) is not None:
                self.take(request, first.position, (first.token_id,))
        for row in frames.rows(message.frame):
            if (request := requests.get(row.slot)) is not None:
                self.take(request, row.position, frames.unpack_ids(row.token_ids))
        for finish in message.finishes:
            if (request := requests.pop(finish.slot, None)) is not None:
                reason = pb.Finish.Reason.Name(finish.reason)
                if finish.reason in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN):
                    assert request.received == finish.end_position == request.output_tokens, reason
                    request.state = "done"
                else:
                    request.state = "failed"
                request.failures.append(reason)
        for failure in message.failures:
            if (request := requests.pop(failure.slot, None)) is not None:
                request.state = "lost" if failure.code == pb.Failure.CODE_REPLICA_LOST else "failed"
                assert failure.code != pb.Failure.CODE_GAP, "the router saw a gap"
                request.failures.append(pb.Failure.Code.Name(failure.code))
        for refusal in message.refusals:
            if (request := requests.pop(refusal.slot, None)) is not None:
                request.state = "failed"
                request.failures.append(pb.Refusal.Reason.Name(refusal.reason))
        self.credit()

    def take(self, request: Request, position: int, ids: tuple[int, ...]) -> None:
        assert position == request.received, f"expected {request.received}, got {position}: repeat or gap"
        for offset, value in enumerate(ids):
            assert value == token(request.request_id, position + offset), "a wrong token"
        request.received += len(ids)

    def credit(self) -> None:
        for slot, request in self.requests.items():
            if self.world.rng.random() < 0.7:
                self.outbox.credit(slot, request.received + 6)
