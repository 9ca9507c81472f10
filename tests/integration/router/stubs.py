"""Stub replicas and scripted frontends around real routers; the test says when a stub's prompts start and end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from kvmesh import blocks, server
from kvmesh.attach.client import AttachLink
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import PROTOCOL_VERSION, AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig
from kvmesh.membership.member import Member
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.tasks import end

DEADLINE_S = 300.0
REPORT_S = 0.2
BLOCKS_TOTAL = 1_000_000


@dataclass(eq=False)
class Prompt:
    """A prompt at a stub."""

    session: StubSession
    submit: pb.Submit
    is_started: bool = False


class Stub:
    """A prefill or decode replica without an engine. State that came over a stream is dropped when the stream breaks."""

    def __init__(self, name: str, role: Literal["prefill", "decode"]) -> None:
        self.name = name
        self.role = role
        self.boot_id = secrets.token_hex(8)
        self.prompts: list[Prompt] = []
        self.sessions: list[StubSession] = []
        self.session_by_peer: dict[str, StubSession] = {}

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> StubSession:
        """See Attachable."""
        session = StubSession(self, outbox)
        self.sessions.append(session)
        self.session_by_peer[peer.process_id] = session
        session.report()
        return session

    def after_event(self) -> None:
        """See Attachable."""

    async def run(self) -> None:
        """Report the load until cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            for session in self.sessions:
                session.report()

    def start(self, prompt: Prompt) -> None:
        """Report the prompt as started by the engine."""
        prompt.is_started = True
        prompt.session.outbox.start(prompt.submit.slot, 10)

    def finish(self, prompt: Prompt) -> None:
        """Report the prompt as computed, with one output token."""
        self.prompts.remove(prompt)
        tokens = len(prompt.submit.token_ids) // 4
        prompt.session.outbox.first_token(
            pb.FirstToken(
                slot=prompt.submit.slot,
                position=prompt.submit.start_position,
                token_id=prompt.submit.end_token_id,
                context_phase_params=b"handoff",
                computed_token_count=tokens,
                prefill_us=1000 * tokens,
            )
        )


class StubSession:
    """The stream of one router."""

    def __init__(self, stub: Stub, outbox: DownwardOutbox) -> None:
        self.outbox = outbox
        self._stub = stub

    def report(self) -> None:
        prompts = self._stub.prompts
        running = sum(prompt.is_started for prompt in prompts)
        is_prefill = self._stub.role == "prefill"
        self.outbox.load(
            pb.LoadReport(
                engine_boot_id=self._stub.boot_id,
                block_total_count=BLOCKS_TOTAL,
                block_free_count=BLOCKS_TOTAL,
                queued_request_count=len(prompts) - running if is_prefill else 0,
                running_request_count=running,
                engine_ready=True,
            )
        )

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """See kvmesh.attach.server.Session."""
        stub = self._stub
        gone = {cancel.slot for cancel in message.cancels}
        stub.prompts = [one for one in stub.prompts if one.session is not self or one.submit.slot not in gone]
        for submit in message.submits:
            self.outbox.accept(submit.slot)
            if stub.role == "prefill":
                stub.prompts.append(Prompt(self, submit))

    def on_closed(self, now_s: float) -> None:
        """See kvmesh.attach.server.Session."""
        self._stub.sessions.remove(self)
        self._stub.prompts = [one for one in self._stub.prompts if one.session is not self]


@asynccontextmanager
async def serving(
    config: MeshConfig, redis_url: str, name: str, role: Literal["prefill", "decode"]
) -> AsyncIterator[Stub]:
    """Serve a stub and keep its lease."""
    stub = Stub(name, role)
    clock = MonotonicClock()
    grpc_server = grpc.aio.server(options=server.SERVER_OPTIONS)
    hello = pb.Hello(process_id=name, boot_id=stub.boot_id, protocol_version=PROTOCOL_VERSION)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(AttachService(stub, hello, clock), grpc_server)
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    await grpc_server.start()
    link = RedisLink(redis_url)
    member = Member(
        process_id=name,
        role=role,
        address=address,
        boot_id=stub.boot_id,
        model_version=config.engine.salt,
        block_tokens=config.engine.block_tokens,
    )
    registration = Registration(link, config.mesh.name, member)
    tasks = [asyncio.create_task(registration.run()), asyncio.create_task(stub.run())]
    try:
        yield stub
    finally:
        await end(tasks)
        await grpc_server.stop(0)
        await link.close()


class Caller:
    """A frontend's stream to one router. Drops all responses."""

    def __init__(self, config: MeshConfig, router: str, address: str) -> None:
        self._config = config
        self.link = AttachLink(
            router,
            address,
            pb.Hello(
                process_id="frontend-0",
                boot_id=secrets.token_hex(8),
                protocol_version=PROTOCOL_VERSION,
            ),
            self,
            MonotonicClock(),
            server.channel,
            keep=True,
        )
        self.heard: list[pb.AttachResponse] = []
        self._task = asyncio.create_task(self.link.run())

    def submit(self, prompt: range, **fields: Any) -> str:
        """Submit a request with these token ids; return its id."""
        request_id, ids, engine = secrets.token_hex(16), pack_ids(prompt), self._config.engine
        submit = pb.Submit(
            slot=self.link.outbox.new_slot(),
            request_id=request_id,
            attempt=1,
            token_ids=ids,
            block_hashes=blocks.pack(blocks.chain(ids, engine.block_tokens, engine.salt)),
            block_tokens=engine.block_tokens,
            model_version=engine.salt,
            credit_position=100,
            end_token_id=7,
            **fields,
        )
        submit.sampling.temperature = 1.0
        submit.budget.max_output_tokens = 8
        self.link.outbox.submit(submit, MonotonicClock().now_s() + DEADLINE_S)
        return request_id

    async def close(self) -> None:
        """End the stream."""
        await end([self._task])

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """See Sink."""

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """See Sink."""
        self.heard.append(message)

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """See Sink."""
