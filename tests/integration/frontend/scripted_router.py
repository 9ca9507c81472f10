"""Routers with real Attach streams over one pool of attempts; a test can stop attempts in any phase.

Tokens are a pure function of the whole history; no engine computes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import xxhash

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.server import SERVER_OPTIONS

FIRST_TEXT_ID = 5
VOCABULARY = 4096
END_ID = 1
TICK_S = 0.002
PHASES = ("queued", "placed", "started", "running")


def next_token(history: bytes) -> int:
    """Return the token after `history` (packed ids); never the end token."""
    return FIRST_TEXT_ID + xxhash.xxh3_64_intdigest(history) % (VOCABULARY - FIRST_TEXT_ID)


def oracle(prompt_ids: list[int], count: int) -> list[int]:
    """Return the whole output of a prompt."""
    history, ids = frames.pack_ids(prompt_ids), []
    for _ in range(count):
        ids.append(next_token(history))
        history += frames.pack_ids(ids[-1:])
    return ids


@dataclass(eq=False)
class Run:
    """One attempt of the pool."""

    submit: pb.Submit
    session: Session | None
    slot: int
    log: TokenLog
    history: bytes
    phase: str = "queued"
    told: int = 0

    @property
    def end(self) -> int:
        """One after its last position."""
        return self.submit.start_position + self.submit.budget.max_output_tokens


@dataclass
class Pool:
    """All attempts of all routers. `hold_at`: no attempt goes beyond this phase; `tokens_max`: nor beyond this
    position.
    """

    hold_at: str = ""
    tokens_max: int = 1 << 30
    runs: list[Run] = field(default_factory=list)
    submits: list[pb.Submit] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    takeovers: int = 0

    async def run(self) -> None:
        """Step every attempt at each tick, until cancelled."""
        while True:
            for run in list(self.runs):
                self._step(run)
            await asyncio.sleep(TICK_S)

    def _step(self, run: Run) -> None:
        if run.phase != "running":
            if run.phase == self.hold_at or run.session is None:
                return
            run.phase = PHASES[PHASES.index(run.phase) + 1]
            outbox = run.session.outbox
            if run.phase == "placed":
                outbox.placement(
                    pb.Placement(slot=run.slot, prefill_replica="prefill-0", decode_replica="decode-0")
                )
            elif run.phase == "started":
                outbox.start(run.slot, 5)
            else:
                self._generate(run)
                run.log.sent += 1
                tokens = len(run.submit.token_ids) // 4
                outbox.first_token(
                    pb.FirstToken(
                        slot=run.slot,
                        position=run.log.start,
                        token_id=frames.unpack_ids(run.history[-frames.TOKEN_BYTES :])[0],
                        computed_token_count=tokens,
                    )
                )
            return
        if run.log.end < min(run.end, self.tokens_max):
            self._generate(run)
        if run.session is None:
            return
        chunk = run.log.take()
        if chunk is not None:
            run.session.outbox.tokens(run.slot, chunk.position, chunk.token_ids)
        if run.log.is_blocked() and (run.log.end == run.end or run.log.end - run.told >= 32):
            run.told = run.log.end
            run.session.outbox.computed(run.slot, run.told)
        if run.log.is_drained() and run.log.end == run.end:
            run.session.outbox.finish(run.slot, run.log.end, pb.Finish.REASON_LENGTH)
            self.drop(run)

    def _generate(self, run: Run) -> None:
        token = next_token(run.history)
        run.history += frames.pack_ids((token,))
        run.log.append((token,))

    def drop(self, run: Run) -> None:
        """Remove an attempt."""
        if run.session is not None:
            run.session.runs.pop(run.slot, None)
        self.runs.remove(run)


class Session:
    """The stream of one frontend at one router."""

    def __init__(self, pool: Pool, outbox: DownwardOutbox) -> None:
        self.pool = pool
        self.outbox = outbox
        self.runs: dict[int, Run] = {}

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """See kvmesh.attach.server.Session."""
        pool = self.pool
        for cancel in message.cancels:
            pool.cancels.append(cancel.reason)
            if cancel.slot in self.runs:
                pool.drop(self.runs[cancel.slot])
        for adopt in message.adopts:
            pool.takeovers += 1
            for run in pool.runs:
                if run.submit.request_id == adopt.request_id:
                    # A lost router may be told of its loss later than the frontend.
                    if run.session is not None:
                        run.session.runs.pop(run.slot, None)
                    run.session, run.slot = self, adopt.slot
                    run.log.rewind(adopt.position, adopt.credit_position)
                    self.runs[adopt.slot] = run
                    self.outbox.accept(adopt.slot)
                    break
            else:
                self.outbox.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, "unknown")
        for submit in message.submits:
            pool.submits.append(submit)
            for run in [each for each in pool.runs if each.submit.request_id == submit.request_id]:
                if run.session is not None:
                    run.session.outbox.finish(run.slot, run.log.end, pb.Finish.REASON_SUPERSEDED)
                pool.drop(run)
            log = TokenLog(submit.start_position, submit.credit_position)
            run = Run(submit, self, submit.slot, log, submit.token_ids)
            self.runs[submit.slot] = run
            pool.runs.append(run)
            self.outbox.accept(submit.slot)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            if slot in self.runs:
                self.runs[slot].log.grant(position)

    def on_closed(self, now_s: float) -> None:
        """See kvmesh.attach.server.Session: running attempts are detached, the others end."""
        for run in list(self.runs.values()):
            run.session = None
            if run.phase != "running":
                self.pool.runs.remove(run)


class ScriptedRouter:
    """Implements Attachable."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session:
        """See kvmesh.attach.server.Attachable."""
        return Session(self.pool, outbox)

    def after_event(self) -> None:
        """See kvmesh.attach.server.Attachable."""


@asynccontextmanager
async def serving_router(pool: Pool, name: str, port: int = 0) -> AsyncIterator[str]:
    """Serve a router of `pool`; yield its address. On exit its streams are killed at once."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id=name, boot_id="1", protocol_version=1)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(
        AttachService(ScriptedRouter(pool), hello, MonotonicClock()), server
    )
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
