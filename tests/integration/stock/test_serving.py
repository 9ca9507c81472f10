"""The mesh in front of the stock backend: facts, load, equal answers, and the fallback to aggregated serving."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.config import MeshConfig, describe
from kvmesh.decode.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.replica.facts_reader import FactsReader
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.fact_sources import ConfiguredFacts
from tests.conftest import unused_port
from tests.integration.engine.servers import Client, Server
from tests.integration.generation import generate, token_request
from tests.integration.harness import START_S_MAX, Part, configure, running_mesh, until
from tests.integration.replicas.caller import Caller
from tests.integration.replicas.test_replicas import is_serving
from tests.integration.stock.conftest import BLOCK_TOKENS, BLOCKS, END_TOKEN, LONGEST, VOCABULARY, Servers
from tests.one_redis import ONE_REDIS

pytestmark = pytest.mark.mesh

LOCAL, GENERATION = pb.PHASE_CONTEXT_AND_GENERATION, pb.PHASE_GENERATION_ONLY
GIVEN = ConfiguredFacts(max_sequence_tokens=LONGEST, vocab_size=VOCABULARY)
CONFIG = configure(
    engine={
        "kind": "external",
        "arithmetic": "hashed",
        "block_tokens": BLOCK_TOKENS,
        "max_sequence_tokens": LONGEST,
        "vocab_size": VOCABULARY,
    },
    frontend={"max_output_tokens_default": 64},
    decode={"engines": ("127.0.0.1:1",)},
)


async def facts_of(server: Server, given: ConfiguredFacts, metrics: str) -> ModelFacts:
    """Read the facts of an engine as a replica does."""
    client = TritonClient(server.grpc)
    try:
        reader = FactsReader(
            client,
            role="decode",
            model_version="kvmesh-1",
            block_tokens=BLOCK_TOKENS,
            configured=given,
            metrics_address=metrics,
        )
        return await reader.read()
    finally:
        await client.close()


async def test_metrics_tell_the_cache_and_the_configuration_the_rest(servers: Servers) -> None:
    """An engine that has run nothing gets one request before its gauges are read again."""
    server = servers.prefill
    facts = await facts_of(server, GIVEN, server.metrics)
    assert (facts.tokens_per_block, facts.kv_blocks) == (BLOCK_TOKENS, BLOCKS)
    assert (facts.max_sequence_tokens, facts.vocab_size) == (LONGEST, VOCABULARY)
    assert facts.model_version == "kvmesh-1" and facts.tries_handoffs
    assert not facts.capabilities.end_token and not facts.capabilities.guided_output
    again = await facts_of(server, replace(GIVEN, kv_blocks=BLOCKS, block_tokens=BLOCK_TOKENS), "")
    assert again == facts


@pytest.mark.parametrize(
    ("given", "has_metrics", "text"),
    [
        (
            GIVEN,
            False,
            (
                "tokens_per_block (the model has no such parameter, and http://{address}/metrics cannot be read "
                "(Connect call failed ('127.0.0.1', {port})); set engine.block_tokens); kv_blocks (the model has no such "
                "parameter, and http://{address}/metrics cannot be read (Connect call failed ('127.0.0.1', {port})); set "
                "engine.kv_blocks)."
            ),
        ),
        (
            ConfiguredFacts(),
            True,
            (
                "it lacks: max_sequence_tokens (the model has no such parameter; set engine.max_sequence_tokens); "
                "vocab_size (the model has no such parameter; set engine.vocab_size)."
            ),
        ),
        (
            replace(GIVEN, kv_blocks=99),
            True,
            "its sources differ: kv_blocks is 99 by engine.kv_blocks and 256 by http://{address}/metrics.",
        ),
    ],
)
async def test_a_fact_without_a_source_or_with_two_is_refused(
    servers: Servers, given: ConfiguredFacts, has_metrics: bool, text: str
) -> None:
    """With one sentence that names the key, or both values."""
    port = unused_port()
    address = servers.decode.metrics if has_metrics else f"127.0.0.1:{port}"
    with pytest.raises(ModelRefused) as refused:
        await facts_of(servers.decode, given, address)
    assert text.format(address=address, port=port) in str(refused.value)


def replica(role: str, server: Server, redis_url: str, folder: Path, config: MeshConfig = CONFIG) -> Part:
    """Return a replica in front of `server`; not started."""
    name = f"{role}-{server.grpc.rpartition(':')[2]}"
    path = folder / "kvmesh.toml"
    path.write_text(describe(config))
    address = f"127.0.0.1:{unused_port()}"
    command = [
        sys.executable,
        "-m",
        f"services.{role}",
        "--config",
        str(path),
        "--id",
        name,
        "--listen",
        address,
    ]
    command += ["--redis", redis_url, "--engine", server.grpc, "--engine-metrics", server.metrics]
    return Part(name, command, address, folder / f"{name}.log")


@asynccontextmanager
async def started(*parts: Part) -> AsyncIterator[None]:
    """Start replicas, and end them."""
    async with AsyncExitStack() as stack:
        for part in parts:
            part.start()
            stack.push_async_callback(part.end)
        for part in parts:
            await until(
                lambda part=part: is_serving(part), START_S_MAX, f"{part.name} serving: {part.tail()}"
            )
        yield


async def run_all(
    caller: Caller, prompts: Sequence[Sequence[int]], **ends: object
) -> list[tuple[list[int], pb.Finish | None]]:
    """Run prompts beside each other on decode alone; return tokens and finish of each."""
    slots = [
        await caller.submit(
            each,
            LOCAL,
            output=40,
            block_tokens=BLOCK_TOKENS,
            model_version="kvmesh-1",
            **(ends or {"end_token_id": END_TOKEN}),
        )
        for each in prompts
    ]
    answers = [await caller.over(slot) for slot in slots]
    for each in answers:
        if each.finish is not None:
            each.finish.slot = 0
    return [(each.ids(), each.finish) for each in answers]


@ONE_REDIS
async def test_decode_replicas_of_both_engines_give_the_same_answers(
    servers: Servers, redis_url: str, tmp_path: Path
) -> None:
    """Tokens with their end token, positions and finish, for one end token or several.

    A replica of the stock engine knows its load from /metrics.
    """
    rng = random.Random(3)
    prompts = [[rng.randrange(16, 4096) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    stock = replica("decode", servers.decode, redis_url, tmp_path)
    plain = replica("decode", servers.reference, redis_url, tmp_path)
    async with started(stock, plain), Caller(stock.address) as one, Caller(plain.address) as other:
        found, expected = await asyncio.gather(run_all(one, prompts), run_all(other, prompts))
        assert found == expected
        ended = [finish for _, finish in found if finish and finish.reason == pb.Finish.REASON_END_TOKEN]
        assert len(ended) > 8 and all(ids for ids, _ in found)
        token = found[0][0][0]  # a further end token ends both, where the model folder lists several
        for ids, finish in await run_all(one, prompts[:1], further_end_token_ids=[token]):
            assert ids == [token] and finish is not None
            assert finish.reason == pb.Finish.REASON_END_TOKEN
        await one.until(lambda: one.loads[-1].block_total_count == BLOCKS)
        await one.until(lambda: one.loads[-1].block_free_count == BLOCKS)
        assert not one.loads[-1].aggregated


@ONE_REDIS
async def test_a_failed_handoff_ends_in_aggregated_serving(
    servers: Servers, redis_url: str, tmp_path: Path
) -> None:
    """The first handoff is the trial. The replica says that it takes no more, and runs prompts itself."""
    stock = replica("decode", servers.decode, redis_url, tmp_path)
    prefill = replica("prefill", servers.prefill, redis_url, tmp_path)
    fields = {"end_token_id": END_TOKEN, "block_tokens": BLOCK_TOKENS, "model_version": "kvmesh-1"}
    async with started(stock, prefill), Caller(stock.address) as decode, Caller(prefill.address) as source:
        tokens = [30, 31, 32]
        to_prefill = await source.submit(tokens, pb.PHASE_CONTEXT_ONLY, **fields)
        await source.until(lambda: source.answers[to_prefill].first is not None)
        first = source.answers[to_prefill].first
        assert first is not None
        slot = await decode.submit(tokens, GENERATION, **fields)
        await decode.until(lambda: decode.answers[slot].rows)
        row = pb.Handoff(slot=slot, context_phase_params=first.context_phase_params, first_token_count=1)
        await decode.send(handoffs=[row])
        failure = (await decode.over(slot)).failure
        assert failure is not None and failure.code == pb.Failure.CODE_ENGINE_ERROR
        await decode.until(lambda: decode.loads[-1].aggregated)
        refusal = (await decode.over(await decode.submit(tokens, GENERATION, **fields))).refusal
        assert refusal is not None and "takes no handoffs" in refusal.message
        assert (await decode.over(await decode.submit(tokens, LOCAL, **fields))).finish is not None
        async with grpc.aio.insecure_channel(stock.address) as channel:
            status = await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(decode_pb2.GetStatusRequest())
        assert "disaggregated" not in status.capabilities
        assert "aggregated" in stock.log.read_text()


async def test_a_mesh_serves_stock_engines(servers: Servers, tmp_path: Path) -> None:
    """Users notice neither the missing end token nor the handoff that fails: the first one hangs at no user."""
    config = msgspec.structs.replace(
        CONFIG,
        engine=msgspec.structs.replace(
            CONFIG.engine, metrics_port=int(servers.decode.metrics.rpartition(":")[2])
        ),
        prefill=msgspec.structs.replace(CONFIG.prefill, engines=(servers.prefill.grpc,)),
        decode=msgspec.structs.replace(CONFIG.decode, engines=(servers.decode.grpc,)),
        control=msgspec.structs.replace(CONFIG.control, replicas=0),
    )
    rng = random.Random(5)
    truth = Client(servers.reference.grpc)
    async with running_mesh(config, tmp_path) as mesh:
        stub = mesh.client()

        async def check() -> None:
            prompt = [rng.randrange(16, 4096) for _ in range(rng.randrange(1, 60))]
            answer = await generate(stub, token_request(prompt, max_output_tokens=40))
            assert answer.error is None, answer.error
            assert answer.ids == (await truth.run(prompt, 40, end_id=END_TOKEN)).tokens

        await check()
        await asyncio.gather(*(check() for _ in range(16)))
        status = await mesh.status("decode-0")
        assert status.load_report.aggregated
    await truth.close()
