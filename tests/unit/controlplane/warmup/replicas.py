"""Replicas for the tests of warm-up: the real cores behind real Attach servers, with engines that have a prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from controlplane.warmup.jobs import Target
from controlplane.warmup.runner import Hot, WarmUpRunner
from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.replica.shell import ReplicaShell
from kvmesh.server import SERVER_OPTIONS
from kvmesh.triton.port import CallKind, EngineSink, FirstAnswer
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from tests.patience import patience
from tests.unit.triton.fake_engine import FakeEngine, Run, facts

CLOCK = MonotonicClock()
BLOCK, VERSION = 4, "v1"
SEQUENCE_MAX = 1024
PACE_S = 0.001
"""Time between two steps of an engine."""


class CachingEngine(FakeEngine):
    """A fake engine with a prefix cache: full blocks of each prompt that it computed or pulled."""

    def __init__(self, sink: EngineSink, boot_id: str) -> None:
        super().__init__(sink, boot_id=boot_id)
        self.cache: set[int] = set()
        self.computed_blocks = 0
        """Blocks of prompts that were not in the cache."""
        self.is_stopped = False
        """True: the engine makes nothing."""

    def learn(self, prompt: bytes) -> None:
        """Put the blocks of `prompt` into the cache."""
        self.cache.update(blocks.chain(prompt, BLOCK, VERSION))

    def _prefill(self, call_id: int, run: Run, now_s: float) -> None:
        chain = blocks.chain(run.call.token_ids, BLOCK, VERSION)
        reused = next((at for at, block in enumerate(chain) if block not in self.cache), len(chain))
        self.computed_blocks += len(chain) - reused
        self.learn(run.call.token_ids)
        handoff = f"{self.boot_id}/{next(self._numbers)}".encode()
        token = run.next_token()
        self.held[handoff] = token
        del self.live[call_id]
        self.sink.on_first(call_id, FirstAnswer(handoff, reused_blocks=reused), now_s)
        self.sink.on_tokens(call_id, (token,), (), now_s)
        self.sink.on_end(call_id, now_s)

    def _generate(self, call_id: int, run: Run, tokens: int, now_s: float) -> None:
        if not run.made:
            if run.call.kind is not CallKind.GENERATION_ONLY:
                self.computed_blocks += len(run.call.token_ids) // 4 // BLOCK
            self.learn(run.call.token_ids)
        super()._generate(call_id, run, tokens, now_s)


@dataclass
class LiveReplica:
    """A replica that answers at `target.address`."""

    target: Target
    core: PrefillCore | DecodeCore
    engine: CachingEngine
    shell: ReplicaShell
    server: grpc.aio.Server
    submits: list[pb.Submit] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True if neither the core nor the engine holds anything."""
        return not self.core.slot_table.slots and not self.engine.live and not self.engine.held

    async def pump(self) -> None:
        """Let the engine work, until cancelled."""
        while True:
            if not self.engine.is_stopped:
                self.engine.step(CLOCK.now_s())
            self.core.set_cached_blocks(self.engine.boot_id, len(self.engine.cache))
            self.shell.after_event()
            await asyncio.sleep(PACE_S)


class _Spy:
    """An Attachable that keeps the submits of a replica."""

    def __init__(self, shell: ReplicaShell, submits: list[pb.Submit]) -> None:
        self._shell, self._submits = shell, submits

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> _SpySession:
        return _SpySession(self._shell.open_session(peer, outbox, now_s), self._submits)

    def after_event(self) -> None:
        self._shell.after_event()


class _SpySession:
    def __init__(self, session: object, submits: list[pb.Submit]) -> None:
        self._session, self._submits = session, submits

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        self._submits.extend(message.submits)
        self._session.on_request(message, now_s)  # type: ignore[attr-defined]  # a Session

    def on_closed(self, now_s: float) -> None:
        self._session.on_closed(now_s)  # type: ignore[attr-defined]  # a Session


@asynccontextmanager
async def serving(name: str, role: str, kv_blocks: int = 256) -> AsyncIterator[LiveReplica]:
    """Serve one replica. It pulls from every address "kv:..."."""
    model = facts(kv_blocks=kv_blocks, max_sequence_tokens=SEQUENCE_MAX)

    def is_source(address: str, now_s: float) -> bool:
        return address.startswith("kv:")

    core: PrefillCore | DecodeCore
    if role == "prefill":
        limits = PrefillLimits(
            queue_max_requests=64, engine_concurrency=8, handoff_timeout_s=10.0, detached_s=0.2
        )
        core = PrefillCore(name, model, limits, is_source=is_source)
    else:
        core = DecodeCore(name, model, DecodeLimits(detached_s=0.2), is_source)
    engine = CachingEngine(core.sink, f"engine-{name}")
    core.connect(engine)
    engine.report(CLOCK.now_s())
    shell = ReplicaShell(core, CLOCK, on_engine=lambda boot_id: None)
    submits: list[pb.Submit] = []
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id=name, boot_id=f"boot-{name}", protocol_version=1)
    service = AttachService(_Spy(shell, submits), hello, CLOCK)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = Target(
        *(name, f"boot-{name}", engine.boot_id, role, "default", VERSION, BLOCK),
        f"127.0.0.1:{port}",
        f"kv:{name}" if role == "prefill" else "",
    )
    replica = LiveReplica(target, core, engine, shell, server, submits)
    pumping = asyncio.create_task(replica.pump())
    try:
        yield replica
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        await server.stop(0)
        shell.close()


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[list[LiveReplica]]:
    """Serve replicas named "prefill-0", "decode-1" and so on. Each engine pulls from all others."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(serving(name, name.partition("-")[0])) for name in names]
        held: dict[bytes, int] = {}
        for replica in replicas:  # handoffs are found wherever they are
            replica.engine.held = held
            replica.engine.peer = replica.engine
        yield replicas


def runner(hot: Hot | None = None) -> WarmUpRunner:
    """Return a runner without certificates."""
    return WarmUpRunner("control-0", "c1", CLOCK, channel, hot=hot)


def channel(address: str, _role: str) -> grpc.aio.Channel:
    """Return a channel of its own to `address`."""
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds."""
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(PACE_S)


def packed(*token_ids: int) -> bytes:
    """Return token ids as bytes."""
    return frames.pack_ids(token_ids)


def hashes(prefixes: Sequence[bytes]) -> set[int]:
    """Return the hashes of all blocks of `prefixes`."""
    return {block for prefix in prefixes for block in blocks.chain(prefix, BLOCK, VERSION)}
