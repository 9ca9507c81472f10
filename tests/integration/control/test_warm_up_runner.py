"""A fresh prefill replica is seeded from a warm one: two real processes on real engines."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio

from controlplane.rollouts.golden import fixed_prompts
from controlplane.warmup.hot_record import HotPrefix, HotQuestion, HotRecord
from controlplane.warmup.jobs import (
    PassJob,
    PassResult,
    ProbeJob,
    ProbeResult,
    SeedJob,
    SeedResult,
    Shape,
    Target,
)
from controlplane.warmup.runner import Hot, WarmUpRunner
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import MonotonicClock
from kvmesh.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.integration.harness import START_S_MAX, Part, running_engine, until
from tests.integration.replicas.caller import Caller
from tests.integration.replicas.test_replicas import CONFIG, is_serving, service
from tests.one_redis import ONE_REDIS

pytestmark = [pytest.mark.mesh, ONE_REDIS]

CLOCK = MonotonicClock()
BLOCK = CONFIG.engine.block_tokens
ROUTERS = (("router-0", "127.0.0.1:1"),)
VOCABULARY = 256
BLOCKS = 8
"""Blocks of each prompt."""


def routers(prompts: Sequence[Sequence[int]], *holders: str) -> Hot:
    """Return routers that know `prompts` at `holders`."""
    found = HotRecord(
        tuple(HotPrefix(pack_ids(each), 1.0, 1, dict.fromkeys(holders, BLOCKS)) for each in prompts)
    )

    async def ask(question: HotQuestion) -> HotRecord:
        return found

    return ask


def runner(hot: Hot | None = None) -> WarmUpRunner:
    """Return a runner without certificates."""
    return WarmUpRunner(
        "control-0", "c1", CLOCK, lambda address, _: grpc.aio.insecure_channel(address), hot=hot
    )


@asynccontextmanager
async def replicas(folder: Path, redis_url: str) -> AsyncIterator[list[Target]]:
    """Run prefill-0, prefill-1 and decode-0."""
    async with AsyncExitStack() as stack:
        parts: list[Part] = []
        for name in ("prefill-0", "prefill-1", "decode-0"):
            place = folder / name
            place.mkdir()
            engine = await stack.enter_async_context(running_engine(CONFIG, place))
            part = service(name.partition("-")[0], engine, redis_url, place, "--id", name)
            part.start()
            stack.push_async_callback(part.end)
            parts.append(part)
        for part in parts:
            await until(lambda part=part: is_serving(part), START_S_MAX, f"{part.name} serving")
        yield [await _target(redis_url, name) for name in ("prefill-0", "prefill-1", "decode-0")]


async def _target(redis_url: str, name: str) -> Target:
    """Return the target of a lease."""
    found: list[dict[str, Any]] = []
    async with redis.asyncio.Redis.from_url(redis_url) as client:

        async def is_leased() -> bool:
            lease = await client.get(f"kvmesh:proc:{name}")
            if lease is not None:
                found.append(json.loads(lease))
            return lease is not None

        await until(is_leased, 5.0, f"{name} leased")
    lease = found[0]
    return Target(
        name,
        lease["boot_id"],
        "",
        name.partition("-")[0],
        "default",
        CONFIG.engine.salt,
        BLOCK,
        lease["address"],
        lease.get("kv_address", ""),
    )


async def is_clean(target: Target) -> bool:
    """Return whether a prefill replica and its engine hold nothing."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        status = await prefill_pb2_grpc.PrefillServiceStub(channel).GetStatus(prefill_pb2.GetStatusRequest())
    load = status.load_report
    is_free = load.block_free_count == load.block_total_count
    return bool(not status.slot_count and not status.engine_call_count and is_free)


async def test_a_seeded_replica_answers_prompts_from_its_cache(tmp_path: Path, redis_url: str) -> None:
    """Pulled from a warm replica, which computes nothing again; confirmed by KV events; the engine has it all."""
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(BLOCKS * BLOCK)] for _ in range(6)]
    async with replicas(tmp_path, redis_url) as (warm, fresh, decode):
        async with Caller(warm.address) as caller:
            for prompt in prompts:
                await _first(caller, prompt)
        job = SeedJob(fresh, (warm,), ROUTERS, 1000, CLOCK.now_s() + 20.0)
        result = await runner(routers(prompts, "prefill-0")).run(job)
        assert isinstance(result, SeedResult) and result.error == ""
        assert result.is_complete and result.prefixes == len(prompts)
        assert result.pulled_blocks == len(prompts) * BLOCKS == result.confirmed_blocks
        async with Caller(fresh.address) as caller:
            for prompt in prompts:
                first = await _first(caller, [*prompt, 1, 2, 3])
                assert (first.cached_token_count, first.computed_token_count) == (len(prompt), 3)
        for target in (warm, fresh):
            await until(lambda target=target: is_clean(target), 3.0, f"{target.process_id} holds nothing")

        run = PassJob(fresh, (Shape(64), Shape(128)), CLOCK.now_s() + 20.0, VOCABULARY)
        warmed = await runner().run(run)
        assert isinstance(warmed, PassResult) and warmed.error == "" and warmed.seconds > 0
        golden = fixed_prompts(VOCABULARY, CONFIG.engine.max_sequence_tokens)
        for target, peers in ((fresh, (decode,)), (decode, (warm, fresh))):
            probe = await runner().run(ProbeJob(target, golden, peers, CLOCK.now_s() + 20.0, 4))
            assert isinstance(probe, ProbeResult) and probe.error == ""
            assert not [answer.error for answer in probe.answers if answer.error]
            assert probe.frees_blocks is True
            assert (probe.handoffs_well, probe.handoffs_failed) == (len(peers), 0)
        await until(lambda: is_clean(fresh), 3.0, "prefill-1 holds nothing")


async def _first(caller: Caller, prompt: Sequence[int]) -> pb.FirstToken:
    """Run a prompt, release its handoff, and return the first token."""
    slot = await caller.submit(prompt, pb.PHASE_CONTEXT_ONLY)
    answers = caller.answers[slot]
    await caller.until(lambda: answers.first is not None or answers.is_over())
    assert answers.first is not None, answers.__dict__
    await caller.send(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_COMPLETE)])
    return answers.first
