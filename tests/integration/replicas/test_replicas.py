"""A prefill and a decode process on real tritonservers, called in the way of a router."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.config import describe
from kvmesh.decode.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from kvmesh.replica.engine_rival import RIVAL_WAIT_S
from tests.conftest import unused_port
from tests.integration.harness import ROOT, START_S_MAX, Part, configure, running_engine, until
from tests.integration.replicas.caller import Caller, submit
from tests.one_redis import ONE_REDIS

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "hashed", "kv_blocks": 128, "block_tokens": 32, "max_sequence_tokens": 2048},
    decode={"detached_s": 1.0},
)
CONTEXT, GENERATION = pb.PHASE_CONTEXT_ONLY, pb.PHASE_GENERATION_ONLY
CLEAN_S = 5.0
"""Longest wait until nothing is held. Handoffs whose cancel got lost are held for longer (engine.handoff_timeout_s)."""

LOCAL = pb.PHASE_CONTEXT_AND_GENERATION


@dataclass
class Pair:
    """A prefill and a decode replica."""

    prefill: Part
    decode: Part
    kv_address: str
    """The address of the prefill replica's engine."""
    _prefill_status: Any  # the stubs' types are those of the sync API
    _decode_status: Any

    async def status(self) -> tuple[prefill_pb2.GetStatusResponse, decode_pb2.GetStatusResponse]:
        """Return the resources that both hold."""
        return (
            await self._prefill_status.GetStatus(prefill_pb2.GetStatusRequest()),
            await self._decode_status.GetStatus(decode_pb2.GetStatusRequest()),
        )

    async def is_clean(self) -> bool:
        """Return whether replicas and engines hold no resources."""
        prefill, decode = await self.status()
        loads = (prefill.load_report, decode.load_report)
        return (
            not prefill.slot_count
            and not prefill.block_reserved_count
            and not prefill.engine_call_count
            and not decode.load_report.block_reserved_count
            and not decode.engine_call_count
            and not decode.pending_slot_count
            and all(load.block_free_count == load.block_total_count for load in loads)
        )


def service(role: str, engine: str, redis_url: str, folder: Path, *more: str, number: int = 0) -> Part:
    """Return a replica of `role`; not started."""
    name = f"{role}-{number}"
    config = folder / "kvmesh.toml"
    config.write_text(describe(CONFIG))
    address = f"127.0.0.1:{unused_port()}"
    command = [sys.executable, "-m", f"services.{role}", "--config", str(config), "--id", name]
    command += ["--listen", address, "--redis", redis_url, "--engine", engine, *more]
    return Part(name, command, address, folder / f"{name}.log")


async def is_serving(part: Part) -> bool:
    """Return whether the health service says SERVING."""
    async with grpc.aio.insecure_channel(part.address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def running_pair(folder: Path, redis_url: str, *engine_options: str) -> AsyncIterator[Pair]:
    """Start two engines and their replicas; end them."""
    async with AsyncExitStack() as stack:
        engines = []
        for role in ("prefill", "decode"):
            place = folder / role
            place.mkdir()
            engines.append(await stack.enter_async_context(running_engine(CONFIG, place, *engine_options)))
        parts = [
            service(role, engine, redis_url, folder)
            for role, engine in zip(("prefill", "decode"), engines, strict=True)
        ]
        channels = []
        for part in parts:
            part.start()
            stack.push_async_callback(_end, part)
            await until(lambda part=part: is_serving(part), START_S_MAX, f"{part.name} serving")
            channels.append(await stack.enter_async_context(grpc.aio.insecure_channel(part.address)))
        yield Pair(
            parts[0],
            parts[1],
            await kv_address(redis_url, "prefill-0"),
            prefill_pb2_grpc.PrefillServiceStub(channels[0]),
            decode_pb2_grpc.DecodeServiceStub(channels[1]),
        )


async def _end(part: Part) -> None:
    if part.process is not None:
        await part.end()


async def kv_address(redis_url: str, name: str) -> str:
    """Return the KV address in the lease of a replica, once there is one."""
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(redis_url) as client:
        while (lease := await client.get(f"kvmesh:proc:{name}")) is None:
            await asyncio.sleep(0.02)
        return str(json.loads(lease)["kv_address"])


async def disaggregated(
    pair: Pair, prefill: Caller, decode: Caller, prompt: Sequence[int], **changes: object
) -> list[int]:
    """Run one request as a router does and return its tokens."""
    request_id = secrets.token_hex(16)
    to_decode = await decode.submit(prompt, GENERATION, request_id=request_id, **changes)
    await decode.until(lambda: bool(decode.answers[to_decode].rows) or decode.answers[to_decode].is_over())
    to_prefill = await prefill.submit(prompt, CONTEXT, request_id=request_id, **changes)
    answers = prefill.answers[to_prefill]
    await prefill.until(lambda: answers.first is not None or answers.is_over())
    assert answers.first is not None, answers.__dict__
    handoff = pb.Handoff(
        slot=to_decode,
        context_phase_params=answers.first.context_phase_params,
        first_token_count=1,
        kv_address=pair.kv_address,
    )
    await decode.send(handoffs=[handoff])
    rest = decode.answers[to_decode]
    await decode.until(lambda: "transfers" in rest.rows or rest.is_over())
    await prefill.send(cancels=[pb.Cancel(slot=to_prefill, reason=pb.Cancel.REASON_TRANSFERRED)])
    await decode.over(to_decode)
    assert rest.finish is not None, rest.__dict__
    return [answers.first.token_id, *rest.ids()]


@ONE_REDIS
async def test_pair_serves_cancels_and_drains(tmp_path: Path, redis_url: str) -> None:
    """Disaggregated or local, the tokens are the same; cancels and lost streams leave nothing; SIGTERM ends with 0."""
    rng = random.Random(11)
    async with running_pair(tmp_path, redis_url, "--step-s", "0.004") as pair:
        async with Caller(pair.prefill.address) as prefill, Caller(pair.decode.address) as decode:
            await _check_same_tokens(pair, prefill, decode, rng)
            await _check_unregistered_source(pair, decode)
            await _check_cancels(pair, prefill, decode, rng)
        await _check_adoption(pair, rng)
        await until(pair.is_clean, CLEAN_S, "nothing held after lost streams")
        await _check_drain(pair)


async def _check_same_tokens(pair: Pair, prefill: Caller, decode: Caller, rng: random.Random) -> None:
    prompts = [[rng.randrange(512) for _ in range(rng.randrange(1, 300))] for _ in range(8)]
    handed = await asyncio.gather(*(disaggregated(pair, prefill, decode, prompt) for prompt in prompts))
    slots = [await decode.submit(prompt, LOCAL) for prompt in prompts]
    local = [(await decode.over(slot)).ids() for slot in slots]
    assert list(handed) == local and all(len(ids) == 20 for ids in local)
    await until(pair.is_clean, CLEAN_S, "nothing held after finishes")


async def _check_unregistered_source(pair: Pair, decode: Caller) -> None:
    slot = await decode.submit([1, 2, 3], GENERATION)
    row = pb.Handoff(slot=slot, context_phase_params=b"x", first_token_count=1, kv_address="127.0.0.1:1")
    await decode.send(handoffs=[row])
    answers = await decode.over(slot)
    assert answers.failure is not None and answers.failure.code == pb.Failure.CODE_HANDOFF_LOST


async def _check_cancels(pair: Pair, prefill: Caller, decode: Caller, rng: random.Random) -> None:
    """Cancel on both sides at random moments, many times; then all resources are free within a second."""

    async def one() -> None:
        prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 400))]
        running = asyncio.create_task(disaggregated(pair, prefill, decode, prompt, output=60))
        await asyncio.sleep(rng.random() * 0.12)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    for _ in range(12):
        await asyncio.gather(*(one() for _ in range(8)))
        for caller in (prefill, decode):
            rows = [pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT) for slot in list(caller.answers)]
            await caller.send(cancels=rows)
            caller.answers.clear()
    await until(pair.is_clean, CLEAN_S, "nothing held after cancels")


async def _check_adoption(pair: Pair, rng: random.Random) -> None:
    """A slot survives the stream that started it (detached stream); a second stream takes over from any position."""
    request_id = secrets.token_hex(16)
    prompt = [rng.randrange(512) for _ in range(50)]
    async with Caller(pair.decode.address, "router-a") as first:
        slot = await first.submit(prompt, LOCAL, request_id=request_id, output=100)
        await first.until(lambda: len(first.answers[slot].tokens) > 5)
        seen = first.answers[slot].ids()
    async with Caller(pair.decode.address, "router-b") as second:
        number = second.new_slot()
        row = pb.Adopt(slot=number, request_id=request_id, attempt=1, position=3, credit_position=1000)
        await second.send(adopts=[row])
        answers = await second.over(number)
        assert answers.finish is not None and answers.finish.end_position == 100, answers.__dict__
        again = await second.submit(prompt, LOCAL, output=100)
        whole = (await second.over(again)).ids()
        assert seen == whole[: len(seen)] and answers.ids() == whole[3:]


async def _check_drain(pair: Pair) -> None:
    """Running requests finish, new ones are refused, health changes first, the exit status is 0."""
    async with Caller(pair.decode.address) as decode:
        running = await decode.submit([5] * 40, LOCAL, output=150)
        await decode.until(lambda: decode.answers[running].first is not None)
        process = pair.decode.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await decode.until(lambda: decode.loads[-1].draining)
        assert not await is_serving(pair.decode)
        late = await decode.submit([5] * 40, LOCAL)
        refusal = (await decode.over(late)).refusal
        assert refusal is not None and refusal.reason == pb.Refusal.REASON_DRAINING
        assert (await decode.over(running)).finish is not None
    assert await asyncio.to_thread(process.wait, 15) == 0, pair.decode.tail()
    pair.decode.process = None
    assert await pair.prefill.end(signal.SIGTERM) == 0, pair.prefill.tail()


async def test_bad_starts_say_one_sentence_and_exit_with_2(tmp_path: Path) -> None:
    """A missing engine, an unreadable configuration: the sentence names the cause, the exit status is 2."""
    redis_url = "redis://127.0.0.1:1"  # neither start reaches Redis
    missing = service("decode", f"127.0.0.1:{unused_port()}", redis_url, tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[decode]\nslots_maximum = 3\n")
    unknown = [sys.executable, "-m", "services.prefill", "--config", str(broken), "--id", "prefill-0"]
    unknown += ["--redis", redis_url, "--engine", "127.0.0.1:1"]
    ends = await asyncio.gather(_outcome(missing.command), _outcome(unknown))
    for (code, sentence), culprit in zip(ends, ("No engine answers at", "decode.slots_maximum"), strict=True):
        assert code == 2 and culprit in sentence and "Traceback" not in sentence, sentence


async def _outcome(command: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, cwd=ROOT
    )
    _, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, error.decode()


def test_submit_of_the_caller_is_within_the_protocol() -> None:
    """The requests of these tests are valid in the protocol."""
    from kvmesh.attach import rules

    rules.check_submit(submit(1, [1, 2, 3], LOCAL), last_slot=0)


@ONE_REDIS
async def test_a_second_replica_with_the_same_engine_ends(tmp_path: Path, redis_url: str) -> None:
    """Both would count the engine's blocks as theirs. The first one serves on, and another engine is no rival."""
    async with running_pair(tmp_path, redis_url) as pair:
        engine = pair.decode.command[list(pair.decode.command).index("--engine") + 1]
        second = service("decode", engine, redis_url, tmp_path, number=1)
        second.start()
        try:
            assert second.process is not None
            assert await asyncio.to_thread(second.process.wait, RIVAL_WAIT_S + START_S_MAX) == 2
        finally:
            await _end(second)
        sentence = "The engine of decode-1 is that of decode-0 too: allowed is an engine for each replica."
        assert second.tail().splitlines()[-1] == sentence
        assert await is_serving(pair.decode) and await is_serving(pair.prefill)
