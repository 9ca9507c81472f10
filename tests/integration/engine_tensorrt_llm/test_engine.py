"""The model on TensorRT-LLM in a real Triton server, as its clients use it. TensorRT-LLM is the recorded surface."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvmesh.attach import frames
from kvmesh.triton import capabilities
from kvmesh.triton.errors import EngineError, InvalidRequest
from kvmesh.triton.port import CallKind, EngineCall
from tests.integration.engine.behaviours import (
    SAMPLED,
    a_stop_ends_the_request_with_its_id,
    answers_equal_the_arithmetic,
    cancel_a_hundred_at_random,
    drawn,
    prompt_of,
)
from tests.integration.engine.servers import Client, Server, request
from tests.integration.engine.subscriptions import apply, read_snapshot, wait_for_load
from tests.integration.engine_tensorrt_llm.fake_servers import (
    BLOCK_TOKENS,
    BLOCKS,
    launch,
    launch_by_hand,
    requests_of,
    write,
)
from tests.integration.replicas.test_engine_port import running_port
from tests.patience import patience
from tests.unit.engine.engines import CONFIG, running
from tests.unit.triton.contract import Rig

Servers = tuple[Server, Server, Server]
_ROOM = BLOCKS * BLOCK_TOKENS
LOWEST = 100
"""Lowest token id of a prompt: the fake fails at some below it."""


def _prompt(seed: int, length: int) -> list[int]:
    return prompt_of(seed, length, LOWEST)


async def _wait_for_held_blocks(client: Client) -> None:
    """Return when a load report tells that blocks are held, or at the third report: they are not held any more."""
    seen = 0
    async with patience(10.0), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            seen += 1
            if report["blocks_free"] < BLOCKS or seen == 3:
                return


async def _fill(client: Client, seed: int, timeout_s: float = 3.0) -> None:
    """Run a request that needs the whole KV cache: no block is held by anything else."""
    async with patience(timeout_s):
        answer = await client.run(_prompt(seed, _ROOM - 8), 8)
    assert answer.error is None and len(answer.tokens) == 8


async def test_the_mesh_reads_all_that_it_needs(servers: Servers) -> None:
    """A replica of either role takes the model, and knows what it offers."""
    for server, role in ((servers[0], "prefill"), (servers[1], "decode")):
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="tensorrt_llm"))
            config = await stub.ModelConfig(service_pb2.ModelConfigRequest(name="tensorrt_llm"))
        found = capabilities.derive(
            metadata, config.config, role=role, model_version="fake-1", block_tokens=BLOCK_TOKENS
        )
        wanted = {
            "disaggregated",
            "kv_events",
            "logprobs",
            "penalties",
            "logit_bias",
            "min_tokens",
            "top_logprobs",
            "end_token",
        }
        assert set(found.capabilities.names()) == wanted
        assert (found.kv_blocks, found.max_sequences, found.vocab_size) == (BLOCKS, 16, 4096)
        assert found.load_report and found.stop and found.digest.startswith("trtllm-")
        parameters = {name: value.string_value for name, value in config.config.parameters.items()}
        assert parameters["end_token"] == "true" and parameters["engine_kind"] == "tensorrt_llm"


async def test_the_warm_up_has_run_before_the_model_was_ready(servers: Servers) -> None:
    """One token at the start, then Triton's two prompts of zeros, then the requests of clients."""
    first, *warm_up = requests_of(servers[1])[:3]
    assert (first["prompt"], first["sampling"]["max_tokens"]) == ([0], 1)
    assert [set(each["prompt"]) for each in warm_up] == [{0}, {0}]
    assert {(len(each["prompt"]), each["sampling"]["max_tokens"]) for each in warm_up} == {(256, 8)}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_disaggregated_equals_aggregated_equals_the_arithmetic_alone(
    prefill: Client, decode: Client, options: Mapping[str, Any]
) -> None:
    """Under concurrency and eviction, aggregated and disaggregated requests give the tokens of the arithmetic."""
    await answers_equal_the_arithmetic(prefill, decode, LOWEST, options)
    await _fill(prefill, 1)
    await _fill(decode, 1)


async def test_answers_end_as_asked(decode: Client) -> None:
    """By length, by the end token, by a further one: each is the last token, and one response has all of them."""
    free = await decode.run(_prompt(2, 9), 10)
    assert len(free.tokens) == 10 and free.is_final
    cut = free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert (await decode.run(_prompt(2, 9), 10, end_id=free.tokens[4])).tokens == cut
    words = [[free.tokens[4]], [1]]
    assert (await decode.run(_prompt(2, 9), 10, end_id=5, stop_words_list=words)).tokens == cut
    whole = await decode.run(_prompt(2, 9), 10, streaming=False)
    assert whole.messages == 1 and whole.tokens == free.tokens


async def test_log_probabilities_come_beside_each_token(decode: Client) -> None:
    """Streamed as deltas: those of the raw logits, with the most likely tokens."""
    call = decode.stream(request(_prompt(3, 20), 6, return_log_probs=True, return_top_log_probs=3, **SAMPLED))
    tokens: list[int] = []
    values: list[float] = []
    top: list[list[int]] = []
    async for result, error in call:
        assert error is None
        tokens += result.as_numpy("output_ids").reshape(-1).tolist()
        values += result.as_numpy("output_log_probs").reshape(-1).tolist()
        top += result.as_numpy("top_log_prob_ids").reshape(-1, 3).tolist()
    assert len(tokens) == len(values) == len(top) == 6
    sampling = drawn(log_probs=True, top=3)
    with running(CONFIG, prefix_reuse=False) as oracle:
        expected = oracle.run(np.array(_prompt(3, 20), dtype=np.int32), 6, sampling=sampling)
    assert tokens == expected.tokens and top == expected.top_ids
    assert values == pytest.approx(expected.log_probs, abs=1e-5)


async def test_a_decode_tells_the_log_probability_of_the_prefills_token(
    prefill: Client, decode: Client
) -> None:
    """The handoff carries it: TensorRT-LLM's decode does not know it."""
    first = await prefill.run(_prompt(4, 20), 4, "context_only", return_log_probs=True)
    rest = await decode.run(
        _prompt(4, 20), 4, "generation_only", handoff=first.handoff, return_log_probs=True
    )
    assert rest.tokens[0] == first.tokens[0]
    told = rest.first["output_log_probs"].reshape(-1)[0]
    assert told == first.first["output_log_probs"].reshape(-1)[0] != 0.0


async def test_reused_blocks_are_told(prefill: Client) -> None:
    """The second time all full blocks are reused, except the block of the recomputed last token."""
    prompt = _prompt(500, 5 * BLOCK_TOKENS)
    cold, warm = await prefill.run(prompt, 2), await prefill.run(prompt, 2)
    assert cold.tokens == warm.tokens and cold.first["kv_cache_reused_blocks"].tolist() == [[0]]
    assert warm.first["kv_cache_reused_blocks"].tolist() == [[4]]
    assert warm.first["first_token_time_ns"] >= warm.first["arrival_time_ns"]


async def test_cancel_and_stop_free_the_blocks_within_a_second(decode: Client) -> None:
    """A cancelled stream, and a request that another one stops by its id."""
    call = decode.stream(request(_prompt(5, 100), 500))
    async for _ in call:
        break
    await wait_for_load(decode, sequences_running=1)
    call.cancel()
    await wait_for_load(decode, 1.0, sequences_running=0, blocks_free=BLOCKS)
    await a_stop_ends_the_request_with_its_id(decode, LOWEST)
    await _fill(decode, 2, 1.0)


async def test_random_cancels_leave_nothing(prefill: Client, decode: Client) -> None:
    """For cancellations at random moments the whole cache is free again, on prefill after the transfer timeout."""
    await cancel_a_hundred_at_random(prefill, decode, LOWEST)
    await _fill(decode, 3, 5.0)
    await wait_for_load(prefill, 5.0, sequences_running=0, sequences_waiting=0)
    await _fill(prefill, 3, 5.0)


async def test_bad_handoffs_are_refused_and_the_next_request_runs(
    prefill: Client, decode: Client, other: Client
) -> None:
    """Cut, of another version, for another prompt, of another engine, used twice, expired: each with its text."""
    prompt = _prompt(7, 50)

    async def decoded(client: Client, handoff: bytes, tokens: list[int] | None = None) -> str:
        answer = await client.run(tokens or prompt, 4, "generation_only", handoff=handoff)
        return str(answer.error)

    first = await prefill.run(prompt, 4, "context_only")
    assert first.handoff is not None
    blob = first.handoff
    assert "malformed: truncated or altered" in await decoded(decode, blob[:-1])
    assert "malformed: version 9" in await decoded(decode, blob[:4] + b"\x09" + blob[5:])
    assert "malformed: not a handoff" in await decoded(decode, b"KVMH" + blob[4:])
    assert "made for another prompt" in await decoded(decode, blob, [*prompt[:-1], 99])
    assert "handoff does not belong to this request: engine is" in await decoded(other, blob)
    assert await decoded(decode, blob) == "None"
    assert "KV handoff" in (twice := await decoded(decode, blob)) and "is unknown or expired" in twice
    late = await prefill.run(prompt, 4, "context_only")
    released = await prefill.run([1], 1, "release_handoff", handoff=late.handoff)
    assert "Invalid value for request_type: release_handoff" in str(released.error)
    await _wait_for_held_blocks(prefill)  # the first report may be older than the handoff
    await wait_for_load(prefill, 5.0, blocks_free=BLOCKS)  # after the transfer timeout
    assert "KV cache transfer failed" in await decoded(decode, late.handoff or b"")
    assert "must be set" in str((await decode.run(prompt, 4, "generation_only")).error)
    await _fill(prefill, 4)


async def test_a_first_token_that_ends_the_answer_has_no_handoff(prefill: Client) -> None:
    """TensorRT-LLM's own servers take no handoff of it either; its blocks are free."""
    free = await prefill.run(_prompt(9, 30), 3)
    ended = await prefill.run(_prompt(9, 30), 3, "context_only", end_id=free.tokens[0])
    assert (
        ended.tokens == free.tokens[:1] and ended.is_final and ended.handoff is None and ended.error is None
    )
    await _fill(prefill, 5)


async def test_adapters_and_retention_reach_the_llm(servers: Servers, decode: Client) -> None:
    """The adapter by its number, ranges with their priorities; a number that the model has not is refused."""
    ranges = {"starts": [0, 8], "ends": [8, -1], "priorities": [100, 10], "durations_ms": [-1, 500]}
    tensors: dict[str, Any] = {f"retention_token_range_{name}": value for name, value in ranges.items()}
    assert (await decode.run(_prompt(10, 20), 2, lora_task_id=7, **tensors)).error is None
    told = requests_of(servers[1])[-1]
    assert told["lora"]["lora_name"] == "legal" and told["lora"]["lora_int_id"] == 7
    found = told["retention"]["token_range_retention_configs"]
    assert [(each["token_start"], each["token_end"], each["priority"]) for each in found] == [
        (0, 8, 100),
        (8, None, 10),
    ]
    assert (
        found[1]["duration_ms"] == "0:00:00.500000" and told["retention"]["decode_retention_priority"] == 35
    )
    assert "lora_task_id: 8; allowed: 7" in str((await decode.run([100], 2, lora_task_id=8)).error)


async def test_events_and_snapshots_give_the_cache(prefill: Client, decode: Client) -> None:
    """Snapshot and events give what a later snapshot gives; ids are consecutive; each boot has its id."""
    cached: set[int] = set()
    async with aclosing(prefill.subscribe("kv_events")) as messages:
        snapshot = await read_snapshot(messages, cached, BLOCK_TOKENS)
        event_id = snapshot["event_id"]
        for turn in range(20):
            assert (await prefill.run(_prompt(900 + turn, 60 + turn), 3)).error is None
        async with patience(5.0):
            while True:
                again: set[int] = set()
                async with aclosing(prefill.subscribe("kv_events")) as fresh:
                    newest = (await read_snapshot(fresh, again, BLOCK_TOKENS))["event_id"]
                while event_id < newest:
                    message = await anext(messages)
                    assert message["boot_id"] == snapshot["boot_id"]
                    for event in message["events"]:
                        event_id += 1
                        assert event["event_id"] == event_id
                        apply([event["data"]], cached, BLOCK_TOKENS)
                report = await wait_for_load(prefill, sequences_running=0)
                if again == cached and len(cached) == report["blocks_cached"] > BLOCKS // 2:
                    break
    assert report["boot_id"] == snapshot["boot_id"]
    assert (await wait_for_load(decode))["boot_id"] != report["boot_id"]


async def test_lost_events_drop_what_was_known(servers: Servers, other: Client) -> None:
    """With a buffer of three events a burst loses some: a subscriber is told that nothing is known, and goes on."""
    cached: set[int] = set()
    drops: list[int] = []

    async def read(messages: AsyncIterator[dict[str, Any]], event_id: int) -> None:
        async for message in messages:
            for event in message["events"]:
                event_id += 1
                assert event["event_id"] == event_id
                apply([event["data"]], cached, BLOCK_TOKENS)
                if event["data"]["type"] == "removed" and not cached:
                    drops.append(event_id)

    async with aclosing(other.subscribe("kv_events")) as messages:
        snapshot, rng = await read_snapshot(messages, cached, BLOCK_TOKENS), random.Random(4)
        reading = asyncio.create_task(read(messages, snapshot["event_id"]))
        async with patience(8.0):
            while not drops and not reading.done():
                # One request alone is told; the burst behind it is more than three events between two polls.
                for count in (1, 16):
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(count):
                            tasks.create_task(other.run(_prompt(rng.randrange(10**6), 30), 4))
                    await wait_for_load(other, sequences_running=0)
                    await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert drops
    assert "KV cache events were lost: kv_cache_config.event_buffer_max_size 3" in servers[2].log.read_text()


async def test_an_error_of_a_request_ends_that_request_alone(other: Client) -> None:
    """The text has TensorRT-LLM's prefix and reason."""
    beside = asyncio.create_task(other.run(_prompt(11, 20), 50))
    failed = await other.run([77, 1, 2], 4)
    assert failed.error is not None and failed.error.endswith("following error: a kernel refused the request")
    assert (await beside).error is None
    assert "exceeds max_sequence_tokens (4096)" in str((await other.run([200], 4096)).error)
    assert f"the pool has only {BLOCKS}" in str((await other.run([200] * 1000, 4)).error)


async def test_step_frames_carry_calls_errors_and_cancels(
    servers: Servers, decode: Client, other: Client
) -> None:
    """On one step stream each call has the tokens of its own stream, a failed or refused call fails alone with its type,
    and a cancelled slot ends before the call beside it.
    """
    prompts = [_prompt(600 + number, 20 + number) for number in range(6)]
    wanted = [(await other.run(prompt, 12)).tokens for prompt in prompts]
    async with _port(servers[2]) as rig:
        beside = [*prompts, [77, 1, 2], [200] * 1000]
        *good, failed, refused = await asyncio.gather(
            *(rig.run(number, _call(number, prompt, 12)) for number, prompt in enumerate(beside))
        )
    assert [(heard.ids, heard.error) for heard in good] == [(tokens, None) for tokens in wanted]
    assert type(failed.error) is EngineError and "a kernel refused the request" in str(failed.error)
    assert isinstance(refused.error, InvalidRequest)
    await _fill(other, 6)

    async with _port(servers[1]) as rig:
        for number, output in ((1, 400), (2, 200)):
            rig.engine.start(number, _call(number, prompts[number], output))
        await rig.until(lambda: len(rig.sink.heard(1).ids) > 2)
        rig.engine.cancel(1)
        await rig.until(lambda: rig.engine.open_calls() < 2)
        assert not rig.sink.heard(2).is_over()
        await rig.until(rig.sink.heard(2).is_over)
        assert len(rig.sink.heard(2).ids) == 200 and not rig.engine.open_calls()
    await _fill(decode, 6)


@asynccontextmanager
async def _port(server: Server) -> AsyncIterator[Rig]:
    """Yield the engine port of a replica, with step frames."""
    async with running_port(server.grpc, [], model_version="fake-1", block_tokens=BLOCK_TOKENS) as (
        rig,
        facts,
    ):
        assert facts.step_frames
        yield rig


def _call(number: int, prompt: list[int], output: int) -> EngineCall:
    return EngineCall(CallKind.CONTEXT_AND_GENERATION, f"f{number}", frames.pack_ids(prompt), output)


async def test_a_written_repository_serves_in_a_server_started_by_hand(tmp_path: Path) -> None:
    """Its code is its own, and a HTTP port that is not Triton's default is no sign of a stop."""
    server = launch_by_hand(write(tmp_path / "h"))
    try:
        server.wait_ready()
        client = Client(server.grpc)
        first = await client.run(_prompt(13, 20), 4)
        assert (first.error, len(first.tokens)) == (None, 4)
        async with patience(20.0), aclosing(client.subscribe("load_report")) as reports:
            seen = 0
            async for _ in reports:  # one each second: the watchdog has looked several times
                seen += 1
                if seen == 3:
                    break
        assert (await client.run(_prompt(13, 20), 4)).tokens == first.tokens
        assert server.process.poll() is None
        await client.close()
    finally:
        server.kill()


async def test_an_llm_that_ended_takes_its_server_down(tmp_path: Path) -> None:
    """Open requests end with an error that names the engine's end, and the server ends, so that it is started anew."""
    server = launch(write(tmp_path / "x", {"fatal_token": 78, "step_s": 0.02}))
    try:
        server.wait_ready()
        client = Client(server.grpc)
        beside = asyncio.create_task(client.run(_prompt(12, 20), 400))
        await wait_for_load(client, sequences_running=1)
        fatal = await client.run([78], 4)
        assert "engine is shutting down" in str(fatal.error)
        assert "engine is shutting down" in str((await beside).error)
        assert await asyncio.to_thread(server.process.wait, 10.0) != 0
        await client.close()
    finally:
        server.kill()


async def test_a_cache_that_is_not_the_told_one_refuses_to_start(tmp_path: Path) -> None:
    """Less room than max_tokens, and blocks of another size: one sentence with both numbers."""
    small = launch(write(tmp_path / "s", {"pool_tokens": 160}))
    wide = launch(write(tmp_path / "w", {"pool_block_tokens": 16}))
    try:
        for server, sentence in (
            (small, "The KV cache has room for 160 tokens"),
            (wide, "The KV cache has blocks of 16 tokens: allowed are 8"),
        ):
            assert await asyncio.to_thread(server.process.wait, 20.0) != 0
            assert sentence in server.log.read_text(encoding="utf-8", errors="replace")
    finally:
        small.kill()
        wide.kill()
