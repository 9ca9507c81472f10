"""Scripted frontends and replicas around one Relay, without sockets: every message may wait, every stream may break."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.admission import RelayLimits
from services.router.mirror import PrefixMirror
from services.router.placement import KappaPolicy
from services.router.relay import Relay
from services.router.replicas import Replica

BLOCK = 4
VERSION = "v1"
ORPHAN_S = 3.0


def token(request_id: str, position: int) -> int:
    """The only token that may stand there, in whatever attempt."""
    return zlib.crc32(f"{request_id}/{position}".encode()) >> 1


class Wire:
    """One stream: messages wait in two queues until somebody delivers them."""

    def __init__(self, up: Callable[[Any], None], down: Callable[[Any], None]) -> None:
        self.upward: deque[pb.AttachRequest] = deque()
        self.downward: deque[pb.AttachResponse] = deque()
        self.up, self.down = up, down


class Link:
    """A link of the router: the outbox, the wire, the peer. See kvmesh.attach.client.AttachLink."""

    def __init__(self, world: World, sink: Replica, peer: Peer) -> None:
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
        """Break the stream; some of what was under way still arrives, before."""
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
        """Let one thing happen on the wire."""
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


class Peer:
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
                block_free_count=self.world.decode_blocks - reserved,
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

    def on_request(self, link: Link, message: pb.AttachRequest) -> None:
        raise NotImplementedError

    def close(self, link: Link) -> None:
        raise NotImplementedError

    def act(self) -> None:
        raise NotImplementedError

    def expire(self) -> None:
        self.runs = [run for run in self.runs if run.expires_s > self.world.now_s]


class FakePrefill(Peer):
    """queued -> started -> held -> gone."""

    role = "prefill"

    def on_request(self, link: Link, message: pb.AttachRequest) -> None:
        self.check(link, message)
        for cancel in message.cancels:
            if (run := self.find(link, cancel.slot)) is not None:
                if cancel.reason == pb.Cancel.REASON_TRANSFERRED:
                    assert run.submit.request_id in self.world.pulled, "forgotten before it was pulled"
                self.runs.remove(run)
        assert not message.handoffs and not message.adopts
        for submit in message.submits:
            assert submit.phase == pb.PHASE_CONTEXT_ONLY
            assert link.down_outbox is not None
            if self.world.chance(0.03):
                link.down_outbox.refuse(submit.slot, pb.Refusal.REASON_QUEUE_FULL, "full")
            else:
                link.down_outbox.accept(submit.slot)
                self.runs.append(Run(submit, link, submit.slot, "queued"))

    def close(self, link: Link) -> None:
        for run in list(self.runs):
            if run.link is link:
                run.link = None
                run.expires_s = self.world.now_s + ORPHAN_S
                if run.state != "held":
                    self.runs.remove(run)

    def act(self) -> None:
        runs = [run for run in self.runs if run.link is not None and run.state != "held"]
        if not runs:
            return
        run = self.world.rng.choice(runs)
        assert run.link is not None and run.link.down_outbox is not None
        out, submit = run.link.down_outbox, run.submit
        if self.world.chance(0.04):
            out.fail(run.slot, pb.Failure.CODE_ENGINE_ERROR, "broke", untouched=run.state == "queued")
            self.runs.remove(run)
        elif self.world.chance(0.02):
            out.finish(run.slot, submit.start_position, pb.Finish.REASON_DEADLINE)
            self.runs.remove(run)
        elif run.state == "queued":
            run.state = "started"
            out.start(run.slot, 100)
        else:
            run.state = "held"
            tokens = len(submit.token_ids) // 4
            cached = min(tokens - 1, BLOCK * self.world.rng.randint(0, tokens // BLOCK))
            out.first_token(
                pb.FirstToken(
                    slot=run.slot,
                    position=submit.start_position,
                    token_id=token(submit.request_id, submit.start_position),
                    context_phase_params=f"{self.name} {submit.request_id} {submit.attempt}".encode(),
                    cached_token_count=cached,
                    computed_token_count=tokens - cached,
                    prefill_us=1000 + 10 * (tokens - cached),
                )
            )


class FakeDecode(Peer):
    """pending -> running -> ended; sends what is credited, sometimes twice."""

    def on_request(self, link: Link, message: pb.AttachRequest) -> None:
        self.check(link, message)
        out = link.down_outbox
        assert out is not None
        for cancel in message.cancels:
            if (run := self.find(link, cancel.slot)) is not None:
                self.runs.remove(run)
        for adopt in message.adopts:
            self.adopt(link, adopt)
        for submit in message.submits:
            self.submit(link, submit)
        for handoff in message.handoffs:
            run = self.find(link, handoff.slot)
            if run is None or run.state != "pending":
                continue
            assert handoff.kv_address and handoff.first_token_count == 1
            name, request_id, attempt = handoff.context_phase_params.decode().split()
            assert request_id == run.submit.request_id and int(attempt) == run.submit.attempt
            run.state = "running"
            run.sent = run.end = run.submit.start_position + 1
            out.start(run.slot, 1)
            self.pull(run, name)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            if (run := self.find(link, slot)) is not None:
                run.credit = max(run.credit, position)

    def pull(self, run: Run, prefill: str) -> None:
        held = any(
            other.submit.request_id == run.submit.request_id and other.submit.attempt == run.submit.attempt
            for other in self.world.peers[prefill].runs
        )
        assert run.link is not None and run.link.down_outbox is not None
        if held:
            self.world.pulled.add(run.submit.request_id)
            run.link.down_outbox.transfer(run.slot, 500)
        else:
            run.link.down_outbox.fail(run.slot, pb.Failure.CODE_HANDOFF_LOST, "no such handoff")
            self.runs.remove(run)

    def submit(self, link: Link, submit: pb.Submit) -> None:
        out = link.down_outbox
        assert out is not None
        for known in self.runs:
            if known.submit.request_id == submit.request_id and known.state != "ended":
                if known.submit.attempt >= submit.attempt:
                    out.refuse(submit.slot, pb.Refusal.REASON_SUPERSEDED, "known")
                    return
                if known.link is not None and known.link.down_outbox is not None:
                    known.link.down_outbox.finish(known.slot, known.sent, pb.Finish.REASON_SUPERSEDED)
                self.runs.remove(known)
                break
        if self.world.chance(0.08):
            reason = self.world.rng.choice((pb.Refusal.REASON_KV_FULL, pb.Refusal.REASON_DRAINING))
            out.refuse(submit.slot, reason, "full")
            return
        is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        run = Run(submit, link, submit.slot, "running" if is_local else "pending")
        run.sent = run.end = submit.start_position
        run.credit = submit.credit_position
        self.runs.append(run)
        out.accept(submit.slot)
        if is_local:
            out.start(submit.slot, 1)

    def adopt(self, link: Link, adopt: pb.Adopt) -> None:
        out = link.down_outbox
        assert out is not None
        for run in self.runs:
            if run.submit.request_id == adopt.request_id and run.submit.attempt == adopt.attempt:
                if run.state == "pending" or not run.submit.start_position <= adopt.position <= run.end:
                    break
                if run.link is not None and run.link.down_outbox is not None:
                    run.link.down_outbox.finish(run.slot, run.sent, pb.Finish.REASON_ADOPTED)
                run.link, run.slot, run.sent = link, adopt.slot, adopt.position
                run.credit, run.expires_s = adopt.credit_position, float("inf")
                if run.state == "ended":
                    run.state = "running"
                out.accept(adopt.slot)
                return
        out.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, "unknown")

    def close(self, link: Link) -> None:
        for run in list(self.runs):
            if run.link is link:
                run.link = None
                run.expires_s = self.world.now_s + ORPHAN_S
                if run.state == "pending":
                    self.runs.remove(run)

    def act(self) -> None:
        rng = self.world.rng
        for run in rng.sample(self.runs, rng.randint(0, len(self.runs))):
            if run.state == "running":
                self.step(run)
        for link in self.world.links:
            if link.peer is self and link.down_outbox is not None and rng.random() < 0.2:
                self.report(link)

    def step(self, run: Run) -> None:
        submit, rng = run.submit, self.world.rng
        last = submit.start_position + submit.budget.max_output_tokens
        run.end = min(last, run.end + rng.randint(0, 3))
        if run.link is None or run.link.down_outbox is None:
            return
        out = run.link.down_outbox
        if self.world.chance(0.01):
            out.fail(run.slot, pb.Failure.CODE_ENGINE_ERROR, "broke")
            self.runs.remove(run)
            return
        until = min(run.end, run.credit)
        is_local = submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        if is_local and run.sent == submit.start_position and until > run.sent and run.slot == submit.slot:
            out.first_token(
                pb.FirstToken(
                    slot=run.slot,
                    position=run.sent,
                    token_id=token(submit.request_id, run.sent),
                    cached_token_count=0,
                    computed_token_count=len(submit.token_ids) // 4,
                )
            )
            run.sent += 1
        if until > run.sent:
            low = run.sent
            if self.world.chance(0.1):  # a repeat
                low = max(submit.start_position, low - rng.randint(1, 3))
            ids = [token(submit.request_id, at) for at in range(low, until)]
            out.tokens(run.slot, low, frames.pack_ids(ids))
            run.sent = until
        if run.sent == last:
            out.finish(run.slot, last, pb.Finish.REASON_LENGTH)
            run.state, run.link = "ended", None
            run.expires_s = self.world.now_s + ORPHAN_S


@dataclass(eq=False)
class Request:
    """One request of the fake frontend, and what it has."""

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


class Stream:
    """A frontend's stream to the router."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outbox = UpwardOutbox()
        self.down_outbox = DownwardOutbox()
        self.session = world.relay.open_session(
            pb.Hello(process_id="frontend"), self.down_outbox, world.now_s
        )
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
            self.world.relay.after_event()
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


class World:
    """Everything around one Relay."""

    def __init__(
        self,
        seed: int,
        *,
        prefills: int = 2,
        decodes: int = 2,
        faults: bool = True,
        local_tokens: int = 8,
        decode_blocks: int = 400,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.faults = faults
        self.decode_blocks = decode_blocks
        self.now_s = 100.0
        self.pulled: set[str] = set()
        self.ended: list[tuple[str, str]] = []
        self.mirror = PrefixMirror()
        self.policy = KappaPolicy(
            "router-0",
            self.mirror,
            self.rng,
            block_tokens=BLOCK,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=local_tokens,
        )
        self.relay = Relay(
            "router-0",
            VERSION,
            BLOCK,
            self.policy,
            RelayLimits(64, 30.0, ORPHAN_S),
            record=lambda item, outcome, now_s: self.ended.append((item.request_id, outcome)),
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
        self.mirror.add(peer.name)
        replica = self.relay.add_replica(peer.name, peer.role, kv_address=f"{peer.name}:1")
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
        """What a frontend does with a request that is not on the way."""
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
        """Let one random thing happen."""
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
        wake_s = self.relay.next_wake_s()
        if wake_s is not None and wake_s <= self.now_s:
            self.relay.on_timer(self.now_s)

    def check(self) -> None:
        self.relay.assert_consistent()
        self.policy.assert_consistent()

    def settle(self) -> None:
        """Deliver everything until nothing moves."""
        for _ in range(10_000):
            moved = [link.move() for link in self.links] + [stream.move() for stream in self.streams]
            if not any(moved):
                return
        raise AssertionError("the wires never fall silent")
