"""Scripted frontends and replicas around one forwarding core, without sockets.

Every message may be delayed, and every stream may break.
"""

from __future__ import annotations

import random
from typing import Any

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.regions.callers import Callers
from tests.unit.router.fake_frontend import Request, Stream
from tests.unit.router.fake_replicas import FakeDecode, FakePrefill
from tests.unit.router.peers import BLOCK, ORPHAN_S, VERSION, Link, Peer, token


class World:
    """The frontends and replicas around one forwarding core."""

    def __init__(
        self,
        seed: int,
        *,
        prefills: int = 2,
        decodes: int = 2,
        faults: bool = True,
        local_tokens: int = 8,
        decode_blocks: int = 400,
        callers: Callers | None = None,
        has_kv_events: bool = True,
    ) -> None:
        self.has_kv_events = has_kv_events
        self.rng = random.Random(seed)
        self.seed = seed
        self.faults = faults
        self.decode_blocks = decode_blocks
        self.now_s = 100.0
        self.pulled: set[str] = set()
        self.ended: list[tuple[str, str]] = []
        self.local_index = LocalPrefixIndex()
        self.policy = CostPolicy(
            "router-0",
            self.local_index,
            self.rng,
            block_tokens=BLOCK,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=local_tokens,
        )
        self.core = ForwardingCore(
            "router-0",
            VERSION,
            BLOCK,
            self.policy,
            ForwardingLimits(64, 30.0, ORPHAN_S),
            record=lambda item, outcome, now_s: self.ended.append((item.submitted.request_id, outcome)),
            callers=callers,
        )
        self.peers: dict[str, Peer] = {}
        self.links: list[Link] = []
        self.streams: list[Stream] = []
        self.requests: list[Request] = []
        for index in range(prefills):
            self.add_peer(FakePrefill(self, f"prefill-{index}"))
        for index in range(decodes):
            self.add_peer(FakeDecode(self, f"decode-{index}"))

    def add_peer(self, peer: Peer) -> Link:
        self.peers[peer.name] = peer
        self.local_index.add(peer.name)
        replica = self.core.add_replica(peer.name, peer.role, kv_address=f"{peer.name}:1")
        replica.has_kv_events = self.has_kv_events
        link = Link(self, replica, peer)
        self.links.append(link)
        link.attach()
        return link

    def chance(self, share: float) -> bool:
        return self.faults and self.rng.random() < share

    def stream(self) -> Stream:
        if not self.streams or (len(self.streams) < 3 and self.rng.random() < 0.1):
            self.streams.append(Stream(self))
        return self.rng.choice(self.streams)

    def new_request(self, tokens: int | None = None, output: int | None = None) -> Request:
        rng = self.rng
        length = tokens or rng.choice((1, 5, 9, 20, 40))
        shared = [rng.randrange(2)] * length
        prompt = frames.pack_ids(
            [*shared[: length // 2], *(rng.randrange(9) for _ in range(length - length // 2))]
        )
        request = Request(f"{rng.getrandbits(128):032x}", prompt, output or rng.choice((1, 2, 5, 12)))
        self.requests.append(request)
        return request

    def submit(self, request: Request, **changes: Any) -> None:
        stream = self.stream()
        known = frames.pack_ids([token(request.request_id, at) for at in range(request.received)])
        ids = request.prompt + known
        request.attempt += 1
        request.slot = stream.outbox.new_slot()
        request.stream, request.state = stream, "submitted"
        stream.requests[request.slot] = request
        submit = pb.Submit(
            slot=request.slot,
            request_id=request.request_id,
            attempt=request.attempt,
            start_position=request.received,
            token_ids=ids,
            block_hashes=blocks.pack(blocks.chain(ids, BLOCK, VERSION)),
            block_tokens=BLOCK,
            model_version=VERSION,
            credit_position=request.received + self.rng.choice((1, 4, 100)),
            end_token_id=-1,
            resumed=request.attempt > 1,
        )
        submit.sampling.temperature = 1.0
        submit.budget.max_output_tokens = request.output_tokens - request.received
        submit.budget.region = request.region
        submit.budget.priority = self.rng.choice((0, 0, 5, -200))
        for name, value in changes.items():
            setattr(submit, name, value)
        stream.outbox.submit(submit, self.now_s + 500)

    def adopt(self, request: Request) -> None:
        stream = self.stream()
        request.slot = stream.outbox.new_slot()
        request.stream, request.state = stream, "submitted"
        stream.requests[request.slot] = request
        stream.outbox.adopt(
            pb.Adopt(
                slot=request.slot,
                request_id=request.request_id,
                attempt=request.attempt,
                position=request.received,
                credit_position=request.received + 5,
                decode_replica=request.decode,
            )
        )

    def continue_(self, request: Request) -> None:
        """Act as a frontend on a request without an attempt: adopt, finish or submit it."""
        if request.state == "lost" and request.decode and self.rng.random() < 0.6:
            self.adopt(request)
        elif request.received == request.output_tokens:
            request.state = "done"
        else:
            self.submit(request)

    def cancel(self, request: Request) -> None:
        if request.stream is not None:
            request.stream.requests.pop(request.slot, None)
            request.stream.outbox.cancel(request.slot, pb.Cancel.REASON_CLIENT)
            request.stream, request.state = None, "cancelled"

    def step(self) -> None:
        """Do one random step."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.6:
            wires: list[Link | Stream] = [*self.links, *self.streams]
            rng.choice(wires).move()
        elif kind < 0.85:
            rng.choice(list(self.peers.values())).act()
        elif kind < 0.97 or not self.faults:
            self.advance(rng.choice((0.0005, 0.003, 0.05)))
        elif kind < 0.98:
            rng.choice(self.links).cut()
        elif kind < 0.985 and self.streams:
            rng.choice(self.streams).cut()
        else:
            link = rng.choice(self.links)
            link.attach()
        for link in self.links:
            if link.down_outbox is None and rng.random() < 0.05:
                link.attach()
        for request in self.requests:
            if request.state in ("failed", "lost") and rng.random() < 0.2:
                self.continue_(request)
        for stream in self.streams:
            if rng.random() < 0.02:
                stream.credit()
        for peer in self.peers.values():
            peer.expire()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        wake_s = self.core.next_wake_s()
        if wake_s is not None and wake_s <= self.now_s:
            self.core.on_timer(self.now_s)

    def check(self) -> None:
        self.core.assert_consistent()
        self.policy.assert_consistent()

    def settle(self) -> None:
        """Deliver all messages until nothing moves."""
        for _ in range(10_000):
            moved = [link.move() for link in self.links] + [stream.move() for stream in self.streams]
            if not any(moved):
                return
        raise AssertionError("messages never stop")
