"""The engine port on a real tritonserver: the contract of all ports, errors, and capabilities derived from the model."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.attach import frames
from kvmesh.clock import MonotonicClock
from kvmesh.triton import step_frames, subscription_policy
from kvmesh.triton.capabilities import Capabilities, ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.engine import TritonEngine
from kvmesh.triton.errors import EngineLost, HandoffLost, InvalidRequest
from kvmesh.triton.port import CallKind, EngineCall, SamplingExtras
from kvmesh.triton.subscription_policy import SubscriptionPolicy
from tests.allocated import allocated_bytes
from tests.chaos.census import resident_bytes
from tests.conftest import unused_port
from tests.integration.harness import (
    START_S_MAX,
    configure,
    engine_part,
    engine_ready,
    running_engine,
    until,
)
from tests.patience import wait_for
from tests.unit.triton.contract import CHECKS, Recorder, Rig, call

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "hashed", "kv_blocks": 64, "block_tokens": 16, "max_sequence_tokens": 512}
)


EXTRAS = SamplingExtras(alternatives=20)


@asynccontextmanager
async def running_port(
    address: str,
    kv_events: list[dict[str, Any]],
    *,
    step_frames: bool = True,
    model_version: str = CONFIG.engine.salt,
    block_tokens: int = 16,
) -> AsyncIterator[tuple[Rig, ModelFacts]]:
    """Yield a port on the engine at `address`, ready."""
    client = TritonClient(address)
    facts = await client.facts(role="prefill", model_version=model_version, block_tokens=block_tokens)
    sink = Recorder()
    engine = TritonEngine(
        client, facts, sink, MonotonicClock(), lambda: None, kv_events.append, step_frames=step_frames
    )
    running = asyncio.create_task(engine.run())
    rig = Rig(engine, sink, lambda: None, facts.kv_address)
    try:
        await rig.until(lambda: sink.is_ready and sink.load is not None)
        yield rig, facts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        await client.close()


async def test_real_engine_keeps_the_contract(tmp_path: Path) -> None:
    """Capabilities, the contract shared with the fake, errors and KV events, on one tritonserver."""
    events: list[dict[str, Any]] = []
    async with running_engine(CONFIG, tmp_path) as address, running_port(address, events) as (rig, facts):
        without = {"guided_output", "guided_resume"}  # the hashed arithmetic has no tokenizer
        assert set(facts.capabilities.names()) == {each.name for each in fields(Capabilities)} - without
        assert (facts.tokens_per_block, facts.kv_blocks, facts.max_sequence_tokens) == (16, 64, 512)
        for check in CHECKS:
            await check(rig)
        await _check_errors(rig)
        await rig.until(lambda: any("events" in message for message in events))
        assert "snapshot" in events[0]
        await _check_refusal(address)
        assert facts.step_frames
        async with running_port(address, [], step_frames=False) as (old, _):
            for check in CHECKS:
                await check(old)
            await _check_errors(old)


async def test_consecutive_streams_form_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a new stream after every message, load reports, KV events and step frames continue: no event and no token is
    lost or repeated, and the state does not flap.
    """
    monkeypatch.setattr(subscription_policy, "RENEW_BYTES", 1)
    opened: list[dict[str, str]] = []
    open_one = SubscriptionPolicy.open

    def counted(one: SubscriptionPolicy) -> dict[str, str]:
        opened.append(open_one(one))
        return opened[-1]

    monkeypatch.setattr(SubscriptionPolicy, "open", counted)
    events: list[dict[str, Any]] = []
    async with running_engine(CONFIG, tmp_path) as address, running_port(address, events) as (rig, _):
        ready: list[bool] = []
        monkeypatch.setattr(rig.sink, "on_ready", lambda is_ready, now_s: ready.append(is_ready))
        for number in range(1, 41):
            await rig.run(number, prompt_call(number, 48))
        await rig.until(lambda: len(opened) > 30 and blocks_of(events) >= 40 * 3)
        renewed = await rig.run(41, call(name="renewed", max_output_tokens=100))
        async with running_port(address, [], step_frames=False) as (old, _):
            assert (await old.run(41, call(name="old", max_output_tokens=100))).ids == renewed.ids
    ids = [event["event_id"] for message in events for event in message.get("events", [])]
    assert ids == list(range(1, len(ids) + 1))
    assert ["snapshot" in message for message in events].count(True) == 1
    assert ready and all(ready)


async def test_the_memory_of_a_server_does_not_grow_with_events(tmp_path: Path) -> None:
    """tritonserver keeps the responses of an open request; the server's memory must not grow with the events sent."""
    events: list[dict[str, Any]] = []
    part = engine_part(CONFIG, tmp_path)
    part.start()
    try:
        await until(lambda: engine_ready(part.address), START_S_MAX, "engine ready")
        async with running_port(part.address, events) as (rig, _):

            async def run(numbers: range) -> None:
                for number in numbers:
                    await rig.run(number, prompt_call(number, 480))

            await run(range(1, 50))
            before_bytes, told = resident_bytes(part.pid), len(events)
            await asyncio.gather(*(run(range(first, first + 250)) for first in range(1000, 5000, 1000)))
            told_bytes = sum(len(msgspec.json.encode(message)) for message in events[told:])
            # A decoded token takes less than half of its bytes on the wire.
            assert told_bytes > 8e6  # the number of events in a message depends on the machine
            assert resident_bytes(part.pid) - before_bytes < 12e6
    finally:
        if part.is_running:
            await part.end()


async def test_the_memory_of_a_server_does_not_grow_with_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of a step stream that is renewed are freed, whatever the number of its calls and renewals."""
    told: list[int] = []
    decode = step_frames.decode

    def counted(frame: bytes) -> step_frames.StepFrame:
        told.append(len(frame) + subscription_policy.RESPONSE_BYTES)
        return decode(frame)

    monkeypatch.setattr(step_frames, "decode", counted)
    part = engine_part(CONFIG, tmp_path)
    part.start()
    try:
        await until(lambda: engine_ready(part.address), START_S_MAX, "engine ready")
        async with running_port(part.address, []) as (rig, _):

            async def run(numbers: range) -> None:
                for number in numbers:
                    await rig.run(
                        number, call(name=f"{number}", max_output_tokens=100, logprobs=True, extras=EXTRAS)
                    )

            async def run_all(count: int, first: int) -> None:
                await asyncio.gather(*(run(range(at, at + count)) for at in range(first, first + 8000, 1000)))

            await run_all(8, 1000)
            before_bytes, told[:] = resident_bytes(part.pid), []
            await run_all(60, 10_000)
            assert sum(told) > 11e6  # the number of rows in a frame depends on the machine
            assert resident_bytes(part.pid) - before_bytes < 8e6
    finally:
        if part.is_running:
            await part.end()


async def test_a_cancelled_call_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Requests that end early are the normal case, and the engine's output after their end must be freed, too."""
    config = msgspec.structs.replace(CONFIG, engine=msgspec.structs.replace(CONFIG.engine, step_s=0.005))
    events: list[dict[str, Any]] = []
    chance = random.Random(1)
    async with running_engine(config, tmp_path) as address, running_port(address, events) as (rig, _):

        async def cancel(numbers: range) -> None:
            for number in numbers:
                for tries in count():  # an engine counts as lost after a stall of the machine
                    await rig.until(lambda: rig.sink.is_ready)
                    rig.engine.start(number, call(name=f"{number}-{tries}", max_output_tokens=200))
                    heard = rig.sink.heard(number)
                    while not ("tokens" in heard.events or heard.is_over()):
                        await asyncio.sleep(0.002)
                    if not heard.is_over():
                        break
                    del rig.sink.calls[number]
                await asyncio.sleep(chance.random() * 0.01)  # at any moment between two responses
                rig.engine.cancel(number)
                del rig.sink.calls[number]
            await rig.until(lambda: not rig.engine.open_calls())

        async def allocated(numbers: range) -> int:
            await asyncio.gather(*(cancel(numbers[start::8]) for start in range(8)))
            events.clear()
            return allocated_bytes()

        before = await allocated(range(1, 161))
        after = await allocated(range(1001, 1401))
        assert after - before < 400 * 200  # 650 bytes and more each, if they leak


async def test_a_call_ends_when_it_is_cancelled_before_it_is_connected(tmp_path: Path) -> None:
    """The engine accepts the connection and sends nothing: gRPC waits without a limit, and so would its callers."""
    silent = socket.create_server(("127.0.0.1", 0))
    silent.setblocking(False)
    client = TritonClient(f"127.0.0.1:{silent.getsockname()[1]}")
    async with running_engine(CONFIG, tmp_path) as address, running_port(address, []) as (_, facts):
        engine = TritonEngine(client, facts, Recorder(), MonotonicClock(), lambda: None)
        for at, kind in enumerate((CallKind.CONTEXT_AND_GENERATION, CallKind.GENERATION_ONLY)):
            engine.start(at, call(kind, f"{at}"))
        connection, _ = await wait_for(asyncio.get_running_loop().sock_accept(silent), 10)
        for at in range(2):
            engine.cancel(at)
        await until(lambda: not engine.open_calls(), 5, "the calls are over")
        await engine.close()
    await client.close()
    connection.close()
    silent.close()


def prompt_call(number: int, tokens: int) -> EngineCall:
    """Return a call with a prompt that shares no prefix with the prompts of other numbers."""
    prompt = [number % 4096, number // 4096, *([7] * (tokens - 2))]
    return EngineCall(CallKind.CONTEXT_AND_GENERATION, f"{number}", frames.pack_ids(prompt), 2)


def blocks_of(events: list[dict[str, Any]]) -> int:
    """Count the blocks that were stored."""
    told = [event["data"] for message in events for event in message.get("events", [])]
    return sum(len(data["blocks"]) for data in told if data["type"] == "stored")


async def _check_errors(rig: Rig) -> None:
    """Real error texts map to their types."""
    long = await rig.run(101, call(name="long", max_output_tokens=10_000))
    assert isinstance(long.error, InvalidRequest), long
    token = EngineCall(CallKind.CONTEXT_ONLY, "token", frames.pack_ids([1 << 30]), 4)
    assert isinstance((await rig.run(102, token)).error, InvalidRequest)
    bad = call(CallKind.GENERATION_ONLY, "bad", context_phase_params=b"nonsense", kv_peer=rig.kv_peer)
    assert isinstance((await rig.run(103, bad)).error, HandoffLost)
    context = await rig.run(104, call(CallKind.CONTEXT_ONLY, "c"))
    assert context.first is not None
    handoff = context.first.context_phase_params
    evil = call(CallKind.GENERATION_ONLY, "evil", context_phase_params=handoff, kv_peer="127.0.0.1:1")
    assert isinstance((await rig.run(105, evil)).error, HandoffLost)
    rig.engine.release(handoff)


async def _check_refusal(address: str) -> None:
    """A model of another version is rejected with one sentence."""
    client = TritonClient(address)
    try:
        with pytest.raises(ModelRefused, match="model_version"):
            await client.facts(role="decode", model_version="another", block_tokens=16)
    finally:
        await client.close()


async def test_dead_engine_is_named_lost() -> None:
    """No process listens: a typed error that names the address."""
    address = f"127.0.0.1:{unused_port()}"
    client = TritonClient(address)
    try:
        with pytest.raises(EngineLost, match=address):
            await client.wait_ready(0.3)
        with pytest.raises(EngineLost):
            await client.facts(role="decode", model_version="v", block_tokens=16)
    finally:
        await client.close()


async def test_lost_engine_fails_its_calls(tmp_path: Path) -> None:
    """When tritonserver dies, every call ends with EngineLost, and the sink gets the state "not ready"."""
    part = engine_part(CONFIG, tmp_path, "--step-s", "0.05")
    part.start()
    try:
        await until(lambda: engine_ready(part.address), START_S_MAX, "engine ready")
        async with running_port(part.address, []) as (rig, _):
            rig.engine.start(1, call(max_output_tokens=400))
            await rig.until(lambda: bool(rig.sink.heard(1).ids))
            await part.end()
            await rig.until(rig.sink.heard(1).is_over)
            assert isinstance(rig.sink.heard(1).error, EngineLost)
            await rig.until(lambda: not rig.sink.is_ready)
    finally:
        if part.process is not None:
            await part.end()
