"""KV seeding between real engines: a warm prefill replica fills the cache of a fresh one, and of a decode replica."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from tests.family import family
from tests.integration.engine.servers import Client
from tests.integration.harness import START_S_MAX, Part, engine_part, engine_ready, until
from tests.integration.replicas.caller import Answers, Caller
from tests.integration.replicas.test_engine_silence import send
from tests.integration.replicas.test_replicas import CONFIG, is_serving, kv_address, service
from tests.one_redis import ONE_REDIS

pytestmark = pytest.mark.mesh

CONTEXT, SEED, GENERATION = pb.PHASE_CONTEXT_ONLY, pb.PHASE_SEED, pb.PHASE_GENERATION_ONLY
WARM_UP = budget_pb2.PURPOSE_WARM_UP
BLOCK = CONFIG.engine.block_tokens
REPLICAS = (("prefill", 0), ("prefill", 1), ("decode", 0))


@dataclass
class Parts:
    """A warm prefill replica, a fresh one and a decode replica, each with its engine."""

    replicas: dict[str, Part]
    engines: dict[str, Part]
    kv_address: str
    """The address of the warm replica's engine."""

    async def status(self, name: str) -> prefill_pb2.GetStatusResponse:
        """Return the status of a prefill replica."""
        async with grpc.aio.insecure_channel(self.replicas[name].address) as channel:
            stub: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
            status: prefill_pb2.GetStatusResponse = await stub.GetStatus(prefill_pb2.GetStatusRequest())
            return status

    async def blocks_cached(self, name: str) -> int:
        """Return the number of cached blocks that an engine reports itself."""
        part = self.engines[name]
        assert part.process is not None
        client = Client(part.address)
        try:
            async with aclosing(client.subscribe("load_report")) as reports:
                async for report in reports:
                    return int(report["blocks_cached"])
        finally:
            await client.close()
        raise AssertionError(f"{name} sent no load report")

    async def is_counted(self, name: str, blocks: int) -> bool:
        """Return whether a replica counts `blocks` cached blocks, as its engine does."""
        counted = (await self.status(name)).load_report.cached_block_count
        return counted == blocks == await self.blocks_cached(name)

    async def is_free(self, name: str) -> bool:
        """Return whether a replica holds no slot, block or engine call."""
        status = await self.status(name)
        return not (status.slot_count or status.block_reserved_count or status.engine_call_count)


@asynccontextmanager
async def running_parts(
    folder: Path, redis_url: str, parts: Sequence[tuple[str, int]] = REPLICAS
) -> AsyncIterator[Parts]:
    """Start engines and replicas; end them. `parts`: roles and numbers."""
    async with AsyncExitStack() as stack:
        engines, replicas = {}, {}
        for (
            role,
            number,
        ) in parts:  # one after the other: these engines share the prefix of their shared memory
            name = f"{role}-{number}"
            (folder / name).mkdir()
            engine = engines[name] = engine_part(CONFIG, folder / name)
            engine.start()
            stack.push_async_callback(_end, engine, signal.SIGINT)
            await until(lambda engine=engine: engine_ready(engine.address), START_S_MAX, f"engine of {name}")
            replicas[name] = service(role, engine.address, redis_url, folder, number=number)
            replicas[name].start()
            stack.push_async_callback(_end, replicas[name], signal.SIGKILL)
        for part in replicas.values():
            await until(lambda part=part: is_serving(part), START_S_MAX, f"{part.name} serving")
        yield Parts(replicas, engines, await kv_address(redis_url, "prefill-0"))


async def _end(part: Part, sig: signal.Signals) -> None:
    if part.process is not None:
        await part.end(sig)


async def pull(
    source: Caller,
    target: Caller,
    prompt: Sequence[int],
    phase: pb.Phase.ValueType,
    address: str,
) -> tuple[pb.FirstToken, Answers]:
    """Run `prompt` at the source and hand it to the target; return the first token and the answers of the target."""
    seed = await target.submit(prompt, phase, output=1, purpose=WARM_UP)
    warm = await source.submit(prompt, CONTEXT, temperature=0.0, purpose=WARM_UP)
    answers = source.answers[warm]
    await source.until(lambda: answers.first is not None or answers.is_over())
    assert answers.first is not None, answers.__dict__
    row = pb.Handoff(
        slot=seed,
        context_phase_params=answers.first.context_phase_params,
        first_token_count=1,
        kv_address=address,
    )
    await target.send(handoffs=[row])
    pulled = await target.over(seed)
    reason = pb.Cancel.REASON_TRANSFERRED if pulled.finish is not None else pb.Cancel.REASON_SUPERSEDED
    await source.send(cancels=[pb.Cancel(slot=warm, reason=reason)])
    return answers.first, pulled


async def first_of(caller: Caller, prompt: Sequence[int], **changes: object) -> pb.FirstToken:
    """Run the context of a prompt, drop its handoff, and return its first token."""
    slot = await caller.submit(prompt, CONTEXT, temperature=0.0, **changes)
    answers = caller.answers[slot]
    await caller.until(lambda: answers.first is not None or answers.is_over())
    assert answers.first is not None, answers.__dict__
    await caller.send(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_COMPLETE)])
    return answers.first


@ONE_REDIS
async def test_a_fresh_replica_is_seeded_from_a_warm_one(tmp_path: Path, redis_url: str) -> None:
    """The target has the prompt cached and gives the same token. Counts of users stay clean, and nothing is left."""
    rng = random.Random(3)
    prompts = [[rng.randrange(512) for _ in range(BLOCK * blocks + 5)] for blocks in (3, 6)]
    async with (
        running_parts(tmp_path, redis_url) as parts,
        Caller(parts.replicas["prefill-0"].address) as source,
        Caller(parts.replicas["prefill-1"].address) as target,
        Caller(parts.replicas["decode-0"].address) as decode,
    ):
        warm = [await first_of(source, prompt) for prompt in prompts]
        assert all(not first.cached_token_count for first in warm)
        before = await parts.status("prefill-0")
        for prompt, known in zip(prompts, warm, strict=True):
            first, pulled = await pull(source, target, prompt, SEED, parts.kv_address)
            assert first.cached_token_count == len(prompt) - 5, (
                "the source says that the prefix was cached there"
            )
            assert first.token_id == known.token_id
            assert pulled.finish is not None, pulled.__dict__
            assert (pulled.finish.end_position, pulled.finish.reason) == (1, pb.Finish.REASON_LENGTH)
            assert "transfers" in pulled.rows and pulled.first is None and not pulled.tokens
        await until(lambda: parts.is_counted("prefill-1", 9), 5.0, "9 blocks counted")
        for name in ("prefill-0", "prefill-1"):
            await until(lambda name=name: parts.is_free(name), 5.0, f"nothing held at {name}")
        after = await parts.status("prefill-0")
        assert after.computed_token_total == before.computed_token_total
        assert after.cached_token_total == before.cached_token_total
        status = await parts.status("prefill-1")
        assert not status.computed_token_total and not status.cached_token_total
        for prompt, known in zip(prompts, warm, strict=True):
            first = await first_of(target, prompt)
            assert (first.token_id, first.cached_token_count) == (known.token_id, len(prompt) - 5)

        _, pulled = await pull(source, target, prompts[0], SEED, "127.0.0.1:1")
        assert pulled.failure is not None and pulled.failure.code == pb.Failure.CODE_HANDOFF_LOST
        refused = await target.over(await target.submit(prompts[0], SEED, output=1))
        assert refused.refusal is not None and refused.refusal.field == "budget.purpose"

        for prompt in prompts:
            _, pulled = await pull(source, decode, prompt, GENERATION, parts.kv_address)
            assert pulled.finish is not None and pulled.finish.end_position == 1, pulled.__dict__
        await decode.until(lambda: decode.loads[-1].cached_block_count == 9)
        for name in ("prefill-0", "prefill-1"):
            await until(lambda name=name: parts.is_free(name), 5.0, f"nothing held at {name}")


@ONE_REDIS
async def test_an_engine_that_dies_during_the_pull_fails_the_seed_alone(
    tmp_path: Path, redis_url: str
) -> None:
    """First the target, then the source: the seed fails, and both replicas free everything.

    A restarted engine counts no block.
    """
    rng = random.Random(4)
    prompts = [[rng.randrange(512) for _ in range(BLOCK * 20)] for _ in range(2)]
    async with (
        running_parts(tmp_path, redis_url, REPLICAS[:2]) as parts,
        Caller(parts.replicas["prefill-0"].address) as source,
        Caller(parts.replicas["prefill-1"].address) as target,
    ):
        await first_of(target, prompts[0][: BLOCK * 2])
        await until(lambda: parts.is_counted("prefill-1", 2), 5.0, "2 blocks counted")
        await _pull_and_die(parts, source, target, prompts[0], victim="prefill-1")
        parts.engines["prefill-1"].start()
        await until(lambda: parts.is_counted("prefill-1", 0), START_S_MAX, "no block after the restart")
        await target.until(lambda: target.loads[-1].engine_ready)
        await _pull_and_die(parts, source, target, prompts[1], victim="prefill-0")


async def _pull_and_die(
    parts: Parts, source: Caller, target: Caller, prompt: Sequence[int], *, victim: str
) -> None:
    """Kill the engine of `victim` while no block of the prompt has left the source."""
    seed = await target.submit(prompt, SEED, output=1, purpose=WARM_UP)
    warm = await source.submit(prompt, CONTEXT, temperature=0.0, purpose=WARM_UP)
    answers = source.answers[warm]
    await source.until(lambda: answers.first is not None)
    assert answers.first is not None
    row = pb.Handoff(
        slot=seed,
        context_phase_params=answers.first.context_phase_params,
        first_token_count=1,
        kv_address=parts.kv_address,
    )
    source_pids, victim_pids = (family(parts.engines[name].pid) for name in ("prefill-0", victim))
    send(source_pids, signal.SIGSTOP)
    await target.send(handoffs=[row])
    await target.until(lambda: "starts" in target.answers[seed].rows)
    send(victim_pids, signal.SIGKILL)
    await parts.engines[victim].end(signal.SIGKILL)
    if victim != "prefill-0":
        send(source_pids, signal.SIGCONT)
    pulled = await target.over(seed)
    assert pulled.failure is not None, pulled.__dict__
    await source.send(cancels=[pb.Cancel(slot=warm, reason=pb.Cancel.REASON_SUPERSEDED)])
    for name in ("prefill-0", "prefill-1"):
        await until(lambda name=name: parts.is_free(name), 15.0, f"nothing held at {name}")
