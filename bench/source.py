"""A stub server of the Attach protocol: a fake decode replica, prefill replica or router, without an engine.

It accepts every submit at once, and sends one token per stream at multiples of the step time. A fake prefill replica or
router delays the first token by the constants below. With `--redis` it registers in the mesh, so that the process under
test finds it. Commands come over stdin (see `control`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import grpc

from bench import control
from bench.pacing import Counters, PacedStreams, token_id_at
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import PROTOCOL_VERSION, AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.cli.certificates import trust_keys
from kvmesh.clock import MonotonicClock
from kvmesh.config import build
from kvmesh.interceptors import ErrorInterceptor
from kvmesh.membership.member import Member
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.server import SERVER_OPTIONS
from kvmesh.trust.peers import Trust

PREFILL_S = 0.005
"""From submit to first token of a fake prefill."""
TRIP_S = 0.002
"""From placement to start at a fake router: the time of decode's reservation and prefill's start."""
TRANSFER_S = 0.003
"""From the first token to the end of the KV transfer at a fake router. The other tokens follow."""
HANDOFF_BYTES = 256
LOAD_REPORT_S = (0.05, 1.0)
"""Shortest and longest time between two load reports in the protocol."""
BLOCKS = 10_000_000
CAPABILITIES = ("disaggregated", "kv_events", "release_handoff", "logprobs", "seeded_resume")


class Source:
    """A fake replica or router: opens sessions and steps their streams."""

    def __init__(self, name: str, role: str, step_s: float) -> None:
        self.name = name
        self.role = role
        self.boot_id = secrets.token_hex(8)
        self.counters = Counters()
        self.step_s = step_s
        self.phases = 1
        """Simulated engines. Their steps are spread evenly over the step time; each has a share of the streams."""
        self.sessions: set[SourceSession] = set()

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> SourceSession:
        """See Attachable."""
        session = SourceSession(self, outbox, asyncio.get_running_loop())
        self.sessions.add(session)
        session.report_load(now_s)
        return session

    def after_event(self) -> None:
        """See Attachable: the source has no timer of its own."""

    async def run(self) -> None:
        """Step all streams at multiples of the step time, until cancelled; a late step does not move the next."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            period_s = self.step_s / self.phases
            next_s += period_s
            now_s = loop.time()
            if now_s > next_s + 10 * period_s:  # far too late: skip the lost steps and count them
                self.counters.late_steps += int((now_s - next_s) / period_s)
                next_s = now_s
            await asyncio.sleep(next_s - now_s)
            now_s = loop.time()
            phase = self.counters.steps % self.phases
            self.counters.steps += 1
            self.counters.late_steps += now_s > next_s + period_s / 4
            for session in self.sessions:
                session.streams.step(session.outbox, phase, self.phases)
                session.report_load(now_s)


class SourceSession:
    """One caller of a source."""

    def __init__(self, source: Source, outbox: DownwardOutbox, loop: asyncio.AbstractEventLoop) -> None:
        self.outbox = outbox
        self.streams = PacedStreams(source.counters)
        self._source = source
        self._loop = loop
        self._waiting: dict[int, pb.Submit] = {}
        self._delayed: dict[int, asyncio.TimerHandle] = {}
        self._reported: tuple[int, int] | None = None
        self._reported_s = -1.0

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """See Session."""
        for cancel in message.cancels:
            self._forget(cancel.slot)
        for submit in message.submits:
            self._source.counters.submits += 1
            self._take(submit)
        for handoff in message.handoffs:
            waiting = self._waiting.pop(handoff.slot, None)
            if waiting is not None:
                self.outbox.transfer(handoff.slot, 1000)
                self._start(waiting, waiting.start_position + 1)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            if slot in self._waiting:
                self._waiting[slot].credit_position = max(position, self._waiting[slot].credit_position)
            self.streams.grant(slot, position)

    def on_closed(self, now_s: float) -> None:
        """See Session."""
        for timer in self._delayed.values():
            timer.cancel()
        self._source.sessions.discard(self)

    def report_load(self, now_s: float) -> None:
        """Send a load report if one is due."""
        load = (len(self.streams.streams), len(self._waiting) + len(self._delayed))
        age_s = now_s - self._reported_s
        if self._source.role == "router" or age_s < LOAD_REPORT_S[load == self._reported]:
            return
        self._reported, self._reported_s = load, now_s
        self.outbox.load(
            pb.LoadReport(
                engine_boot_id=self._source.boot_id,
                block_total_count=BLOCKS,
                block_free_count=BLOCKS,
                running_request_count=load[0],
                queued_request_count=load[1],
                step_us=int(self._source.step_s * 1e6),
                engine_ready=True,
            )
        )

    def _take(self, submit: pb.Submit) -> None:
        slot = submit.slot
        self.outbox.accept(slot)
        match self._source.role:
            case "router":
                self.outbox.placement(
                    pb.Placement(
                        slot=slot,
                        prefill_replica="prefill-0",
                        decode_replica="decode-0",
                        prompt_block_count=len(submit.block_hashes) // 8,
                    )
                )
                self._after(TRIP_S, slot, lambda: self._play_prefill(submit))
            case "prefill":
                self.outbox.start(slot, 0)
                self._after(PREFILL_S, slot, lambda: self._end_prefill(submit))
            case _:
                if submit.phase == pb.PHASE_GENERATION_ONLY:
                    self._waiting[slot] = submit
                else:
                    self._begin(submit)

    def _begin(self, submit: pb.Submit) -> None:
        self.outbox.start(submit.slot, 0)
        self.outbox.first_token(self._first(submit))
        self._start(submit, submit.start_position + 1)

    def _start(self, submit: pb.Submit, position: int) -> None:
        end = submit.start_position + submit.budget.max_output_tokens
        if position >= end:
            self.outbox.finish(submit.slot, end, pb.Finish.REASON_LENGTH)
            return
        self.streams.start(submit.slot, position, end, submit.credit_position)

    def _after(self, delay_s: float, slot: int, call: Callable[[], None]) -> None:
        """Call `call` later, unless `slot` is cancelled before."""

        def fire() -> None:
            del self._delayed[slot]
            call()

        self._delayed[slot] = self._loop.call_later(delay_s, fire)

    def _play_prefill(self, submit: pb.Submit) -> None:
        """Report a prefill and a transfer as a router does."""

        def first() -> None:
            self.outbox.first_token(self._first(submit))
            self._after(TRANSFER_S, submit.slot, transferred)

        def transferred() -> None:
            self.outbox.transfer(submit.slot, int(TRANSFER_S * 1e6))
            self._start(submit, submit.start_position + 1)

        self.outbox.start(submit.slot, 0)
        self._after(PREFILL_S, submit.slot, first)

    def _end_prefill(self, submit: pb.Submit) -> None:
        row = self._first(submit)
        row.context_phase_params = bytes(HANDOFF_BYTES)
        self.outbox.first_token(row)

    def _first(self, submit: pb.Submit) -> pb.FirstToken:
        return pb.FirstToken(
            slot=submit.slot,
            position=submit.start_position,
            token_id=token_id_at(submit.start_position),
            computed_token_count=len(submit.token_ids) // 4,
            prefill_us=int(PREFILL_S * 1e6),
        )

    def _forget(self, slot: int) -> None:
        self.streams.stop(slot)
        self._waiting.pop(slot, None)
        timer = self._delayed.pop(slot, None)
        if timer is not None:
            timer.cancel()


async def serve(
    role: Literal["decode", "prefill", "router"],
    id_: str,
    redis: str = "",
    mesh: str = "kvmesh",
    model_version: str = "kvmesh-1",
    block_tokens: int = 32,
    step_ms: float = 20.0,
    certificates: str = "",
) -> None:
    """Serve until stdin ends.

    `redis`: URL; empty registers nowhere. `certificates`: folder of `kvmesh certificates`; empty: plain text.
    """
    source = Source(id_, role, step_ms / 1000)
    hello = pb.Hello(process_id=source.name, boot_id=source.boot_id, protocol_version=PROTOCOL_VERSION)
    trust = stub_trust(certificates, role)
    server = grpc.aio.server(
        interceptors=(ErrorInterceptor(), *trust.guards()),
        options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", 64 << 20)),
    )
    attach_pb2_grpc.add_AttachServiceServicer_to_server(
        AttachService(source, hello, MonotonicClock()), server
    )

    async def pace(step_ms: float, phases: int = 1) -> None:
        source.step_s, source.phases = step_ms / 1000, phases

    async def counters() -> Mapping[str, Any]:
        live = sum(len(session.streams.streams) for session in source.sessions)
        return {**dataclasses.asdict(source.counters), "live": live, "sessions": len(source.sessions)}

    tls = trust.server_credentials()
    credentials = tls.grpc_credentials() if tls else None
    async with asyncio.TaskGroup() as tasks, control.serving(server, credentials) as address:
        member = Member(
            process_id=source.name,
            role=role,
            address=address,
            boot_id=source.boot_id,
            model_version=model_version,
            block_tokens=block_tokens,
            kv_address="" if role == "router" else "127.0.0.1:9",
            engine_boot_id="" if role == "router" else source.boot_id,
            capabilities=CAPABILITIES,
        )
        running = [tasks.create_task(source.run(), name="source-steps")]
        if redis:
            registration = Registration(RedisLink(redis), mesh, member)
            running.append(tasks.create_task(registration.run(), name="source-lease"))
        await control.serve_commands(pace, counters, address=address)
        for task in running:
            task.cancel()


def stub_trust(folder: str, role: str) -> Trust:
    """Return the trust of a stub with the certificates in `folder`; empty: plain text."""
    return Trust(build({"trust": trust_keys(Path(folder))} if folder else {}), role)


if __name__ == "__main__":
    control.main(serve, __doc__)
