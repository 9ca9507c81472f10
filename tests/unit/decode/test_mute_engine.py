"""A decode replica whose engine offers step frames and sends none, beside one with a sound engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from engines.contract.outputs import RequestOutput
from engines.contract.request import EngineRequest
from engines.contract.step_streams import SlotStream
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.replica.shell import ReplicaShell
from kvmesh.triton import capabilities
from kvmesh.triton.engine import TritonEngine
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from tests.unit.conformance.fake_server import Stream
from tests.unit.conformance.framed_server import FramedServer
from tests.unit.frontend.budgets.virtual_time import VirtualLoop, simulate
from tests.unit.triton.reader import HELLO, Reader, SlotView, submit

LIMITS = DecodeLimits()
PROMPT = list(range(400, 440))
LOOK_S = 0.05
CLOSED_S = 6.0
"""Time in which the engine frees the blocks of a cancelled call, and reports it."""


class MuteServer(FramedServer):
    """Takes calls and cancels, and sends no frame with a row. A call holds its blocks until it is cancelled."""

    def submit(self, stream: Stream, request: EngineRequest) -> None:
        """Take a call, and do not run it to its end."""
        super().submit(stream, request)
        self._sequences[stream.key].is_hung = True

    def send_row(self, slot: SlotStream, output: RequestOutput) -> None:
        """Send nothing."""


class Replica:
    """A decode core on a fake server, with one router."""

    def __init__(self, server: FramedServer) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop, self.server = loop, server

    async def start(self) -> None:
        """Start the engine port, and wait until it is ready."""
        metadata, config = await self.server.describe()
        facts = capabilities.derive(metadata, config, role="decode", model_version="v1", block_tokens=8)
        assert facts.step_frames
        self.core = DecodeCore("decode-0", facts, LIMITS, lambda *_: True, lambda _: None)
        self.shell = ReplicaShell(self.core, self.loop, lambda _: None)
        self.engine = TritonEngine(
            cast(Any, self.server), facts, self.core.sink, self.loop, self.shell.after_event
        )
        self.core.connect(self.engine)
        self.running = asyncio.create_task(self.engine.run())
        outbox = DownwardOutbox()
        self.session = self.core.open_session(HELLO, outbox, self.loop.now_s())
        self.reader = Reader(outbox)
        while not self.core.sink.is_ready:
            await asyncio.sleep(LOOK_S)

    def submit(self, slot: int) -> SlotView:
        """Submit a prompt to be run here."""
        message = submit(slot, PROMPT, pb.PHASE_CONTEXT_AND_GENERATION, remaining_ms=300_000, block_tokens=8)
        view = self.reader.open(slot, 0)
        self.session.on_request(pb.AttachRequest(submits=[message]), self.loop.now_s())
        self.shell.after_event()
        return view

    async def over(self, view: SlotView) -> float:
        """Return the seconds until the slot's end."""
        started_s = self.loop.now_s()
        while not view.is_over():
            await asyncio.sleep(LOOK_S)
            self.reader.read(self.loop.now_s())
            self.core.assert_consistent()
        return self.loop.now_s() - started_s

    async def close(self) -> None:
        """End all tasks."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.engine.close()
        self.shell.close()


def test_a_mute_engine_fails_its_calls_within_the_bound_of_silence() -> None:
    """Its load reports come, so it is not lost. Each call fails as stalled, slots and KV blocks are free in the replica and
    in the engine, and the calls of the other engine are served.
    """

    async def main() -> None:
        mute, sound = Replica(MuteServer("a:1")), Replica(FramedServer("b:1"))
        for replica in (mute, sound):
            await replica.start()
        for first_slot in (1, 3):
            views = [mute.submit(first_slot), mute.submit(first_slot + 1)]
            good = sound.submit(first_slot)
            assert await sound.over(good) < 1.0 and good.finish is not None
            assert not mute.server.is_empty()
            stalled_s = max([await mute.over(view) for view in views])
            assert stalled_s < LIMITS.first_token_timeout_s + LOOK_S
            assert all(view.failure is not None for view in views)
            assert {view.failure.code for view in views if view.failure} == {pb.Failure.CODE_STALLED}
            await asyncio.sleep(CLOSED_S)
            assert not mute.engine.open_calls() and mute.server.is_empty()
            assert mute.core.is_idle() and not mute.core.slot_table.reservations.reserved
        for replica in (mute, sound):
            await replica.close()
        await asyncio.sleep(CLOSED_S)  # the servers end their last step

    simulate(main())
