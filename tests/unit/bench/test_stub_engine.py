"""The stub engine keeps the contract of engines, over gRPC, and its cache is what its events tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from bench import paced_engine
from bench.engines import BLOCK_TOKENS, MODEL_VERSION
from bench.paced_engine import HOLD_S, EngineSize, PacedEngine
from bench.pacing import token_id_at
from bench.stub_engine import StubEngine
from engines.contract.errors import EngineError
from engines.contract.kv_events import BlocksStored
from engines.contract.request import EngineRequest, RequestKind
from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.clock import MonotonicClock
from kvmesh.triton.client import TritonClient
from kvmesh.triton.engine import TritonEngine
from kvmesh.triton.errors import InvalidRequest
from kvmesh.triton.tensors import RequestTensors
from tests.unit.triton.contract import CHECKS, Recorder, Rig, call

BLOCK = 4
SALT = "salt"
INPUTS = frozenset({"input_lengths", "request_output_len", "streaming", "stop"})


@dataclass(frozen=True, slots=True)
class Running:
    """A stub, an engine port before it, the client of the port and the messages of KV events."""

    stub: StubEngine
    rig: Rig
    client: TritonClient
    events: list[dict[str, object]]


@asynccontextmanager
async def running(*, step_frames: bool = True) -> AsyncIterator[Running]:
    """Start a stub with steps of 1 ms and an engine port. Yield them once the load is known."""
    stub = StubEngine(EngineSize(salt=MODEL_VERSION), 0.001)
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stub, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client, sink, events = TritonClient(address), Recorder(), list[dict[str, object]]()
    try:
        for role in ("prefill", "decode"):
            facts = await client.facts(role=role, model_version=MODEL_VERSION, block_tokens=BLOCK_TOKENS)
        engine = TritonEngine(
            client, facts, sink, MonotonicClock(), lambda: None, events.append, step_frames=step_frames
        )
        tasks = [asyncio.create_task(work) for work in (stub.run(), engine.run())]
        rig = Rig(engine, sink, lambda: None)
        await rig.until(lambda: sink.load is not None)
        try:
            yield Running(stub, rig, client, events)
        finally:
            for task in tasks:
                task.cancel()
            await engine.close()
    finally:
        await client.close()
        await server.stop(None)
        stub.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_stub_keeps_the_contract(
    check: Callable[[Rig], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica finds both roles in its model, and cannot tell the stub from an engine by its calls."""
    monkeypatch.setattr(paced_engine, "HOLD_S", 1e6)
    async with running() as one:
        await check(one.rig)


@pytest.mark.parametrize("way", ["cancel", "stop", "leave"])
async def test_a_call_can_be_ended_early(way: str) -> None:
    """A cancelled or stopped call makes no more tokens, nor does one whose client has left."""
    async with running() as one:
        one.rig.engine.start(1, call(name="long", max_output_tokens=8000))
        await one.rig.until(lambda: one.stub.running == 1)
        if way == "cancel":
            one.rig.engine.cancel(1)
        elif way == "stop":
            await one.client.request_once(RequestTensors(INPUTS).of_stop(), request_id="long")
        else:
            await one.client.close()
        one.rig.timeout_s = 3.0
        await one.rig.until(lambda: not one.stub.running)


async def test_prompts_and_outputs_are_kv_events() -> None:
    """A block with the end of a prompt and the begin of its output reaches the subscriber, with a router's hash."""
    prompt = list(range(1, BLOCK_TOKENS - 1))
    whole = frames.pack_ids([*prompt, token_id_at(0), token_id_at(1)])
    (wanted,) = blocks.chain(whole, BLOCK_TOKENS, MODEL_VERSION)
    async with running() as one:
        await one.rig.until(lambda: bool(one.events))  # the snapshot
        await one.rig.run(1, replace(call(), token_ids=frames.pack_ids(prompt)))
        await one.rig.until(lambda: str(wanted) in str(one.events[1:]))


async def test_a_request_without_a_slot_is_refused() -> None:
    """The stub sends step frames only, and says so."""
    async with running(step_frames=False) as one:
        heard = await one.rig.run(1, call())
    assert isinstance(heard.error, InvalidRequest) and "step frames only" in str(heard.error)


def asked(key: int, prompt: list[int], tokens: int, **changes: object) -> EngineRequest:
    """Return a request with both phases."""
    made = EngineRequest(
        key, str(key), RequestKind.CONTEXT_AND_GENERATION, np.array(prompt, np.int32), tokens
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("seed", range(10))
def test_each_request_gets_its_tokens_and_events_tell_the_cache(seed: int) -> None:
    """Tokens come in order and as many as asked for. Events alone give the cache, with all ancestors of a block."""
    draw = random.Random(seed)
    engine = PacedEngine("boot", EngineSize(draw.randrange(40, 80), BLOCK, SALT), 0.02)
    wanted: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    told: dict[int, tuple[int | None, bytes]] = {}
    for key in range(40):
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
        wanted[key] = draw.randint(1, 12)
        output = engine.begin(asked(key, prompt, wanted[key]), 0.0)
        made[key] = list(output.tokens)
        for number, later in engine.step(0.0) if draw.random() < 0.7 else ():
            made[number] += later.tokens
            assert later.is_final == (len(made[number]) == wanted[number])
    while len(engine):
        for number, later in engine.step(0.0):
            made[number] += later.tokens
    assert made == {key: [token_id_at(at) for at in range(count)] for key, count in wanted.items()}
    for event in engine.take_events():
        if isinstance(event, BlocksStored):
            parent = event.parent
            for value, tokens in event.blocks:
                assert parent is None or parent in told
                assert value == blocks.child_hash(
                    blocks.root_hash(SALT) if parent is None else parent, tokens
                )
                told[value] = (parent, tokens)
                parent = value
        else:
            for value in event.hashes:
                del told[value]
    assert told == {one.blocks[0][0]: (one.parent, one.blocks[0][1]) for one in engine.snapshot()}
    assert (
        len(told) == engine.load().blocks_cached and engine.load().blocks_free == engine.load().blocks_total
    )


def test_a_handoff_is_used_once_and_not_held_for_ever() -> None:
    """A handoff fails at its second use. An unused handoff is dropped."""
    engine = PacedEngine("boot", EngineSize(100, BLOCK, SALT), 0.02)
    outputs = [engine.begin(asked(key, [1, 2], 5, kind=RequestKind.CONTEXT_ONLY), 0.0) for key in (1, 2)]
    first, second = (output.handoff or b"" for output in outputs)
    assert first != second and engine.load().handoffs_held == 2 and not len(engine)
    taken = {"kind": RequestKind.GENERATION_ONLY, "context_phase_params": first}
    assert engine.begin(asked(3, [1, 2], 5, **taken), 0.0).tokens == [token_id_at(0)]
    with pytest.raises(EngineError, match="unknown or expired"):
        engine.begin(asked(4, [1, 2], 5, **taken), 0.0)
    engine.step(HOLD_S)
    assert engine.load().handoffs_held == 0
