"""The engine through a real tritonserver, as its clients use it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engines.contract.request import SamplingParams
from engines.contract.tensors import INPUTS, OUTPUTS
from engines.reference.block_pool import chain_hashes, root_hash
from tests.integration.engine.conftest import BLOCK_TOKENS, BLOCKS
from tests.integration.engine.servers import Client, Server, launch, request
from tests.patience import patience
from tests.unit.engine.engines import CONFIG, running

_SAMPLED = {"temperature": 0.9, "runtime_top_p": 0.9, "seed": 11}


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(16, 4096), k=length)


async def _wait_for_load(client: Client, timeout_s: float = 3.0, **wanted: int) -> dict[str, Any]:
    """Return the first load report with these values."""
    async with patience(timeout_s), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            if all(report[name] == value for name, value in wanted.items()):
                return report
    raise AssertionError("subscription ended")


async def _wait_idle(client: Client, timeout_s: float = 3.0) -> None:
    await _wait_for_load(
        client, timeout_s, blocks_free=BLOCKS, sequences_running=0, sequences_waiting=0, handoffs_held=0
    )


async def test_metadata_and_parameters_describe_the_contract(
    prefill: Client, servers: tuple[Server, Server]
) -> None:
    """The metadata and parameters that the adapter reads at start are there, with the batch dimension first."""
    metadata, parameters = await prefill.metadata(), await prefill.parameters()
    assert {one["name"] for one in metadata["inputs"]} == {one.name for one in INPUTS}
    assert {one["name"] for one in metadata["outputs"]} == {one.name for one in OUTPUTS}
    shapes = {one["name"]: [int(size) for size in one["shape"]] for one in metadata["outputs"]}
    assert shapes["output_ids"] == [-1, -1, -1] and shapes["sequence_length"] == [-1, -1]
    assert parameters["tokens_per_block"] == str(BLOCK_TOKENS) and parameters["kv_blocks"] == str(BLOCKS)
    assert parameters["kv_address"] == servers[0].kv and parameters["release_handoff"] == "true"


@pytest.mark.parametrize("options", [{}, _SAMPLED], ids=["greedy", "sampled"])
async def test_disaggregated_equals_aggregated_equals_no_reuse(
    prefill: Client, decode: Client, options: dict[str, Any]
) -> None:
    """Under concurrency and eviction, aggregated and disaggregated requests give the same tokens."""
    prompts = [_prompt(seed % 5, 40)[: 20 + seed] + _prompt(100 + seed, 1 + seed * 3) for seed in range(20)]

    async def disaggregated(prompt: list[int]) -> list[int]:
        first = await prefill.run(prompt, 12, "context_only", **options)
        assert first.error is None and first.messages == 1 and first.is_final and first.handoff is not None
        rest = await decode.run(prompt, 12, "generation_only", handoff=first.handoff, **options)
        assert rest.error is None and rest.tokens[:1] == first.tokens
        return rest.tokens

    async with asyncio.TaskGroup() as tasks:
        apart = [tasks.create_task(disaggregated(prompt)) for prompt in prompts]
        whole = [tasks.create_task(decode.run(prompt, 12, **options)) for prompt in prompts]
    sampling = (
        SamplingParams(float(np.float32(0.9)), 0, float(np.float32(0.9)), 11) if options else SamplingParams()
    )
    with running(CONFIG, prefix_reuse=False) as oracle:
        for prompt, one, other in zip(prompts, apart, whole, strict=True):
            expected = oracle.run(np.array(prompt, dtype=np.int32), 12, sampling=sampling).tokens
            assert one.result() == other.result().tokens == expected
    await _wait_idle(prefill)
    await _wait_idle(decode)


async def test_perf_metrics_report_the_prefix_hit(prefill: Client) -> None:
    """The second time all full blocks are reused, except the block of the recomputed last token."""
    prompt = _prompt(500, 5 * BLOCK_TOKENS)
    cold, warm = await prefill.run(prompt, 2), await prefill.run(prompt, 2)
    assert cold.tokens == warm.tokens
    assert cold.first["kv_cache_reused_blocks"].tolist() == [[0]]
    assert warm.first["kv_cache_reused_blocks"].tolist() == [[4]]
    assert warm.first["kv_cache_alloc_total_blocks"].tolist() == [[6]]
    assert warm.first["kv_cache_alloc_new_blocks"].tolist() == [[2]]
    assert warm.first["first_token_time_ns"] >= warm.first["arrival_time_ns"]


async def test_response_shapes_and_log_probabilities(prefill: Client) -> None:
    """Each response gives its number of ids; log-probabilities come beside them; without streaming there is one
    response.
    """
    answer = await prefill.run(_prompt(1, 9), 5, streaming=False, return_log_probs=True)
    assert answer.messages == 1 and answer.is_final and len(answer.tokens) == 5
    assert answer.first["sequence_length"].tolist() == [[5]]
    assert answer.first["output_log_probs"].shape == (1, 1, 5)
    assert np.allclose(answer.first["cum_log_probs"], answer.first["output_log_probs"].sum())


async def test_the_end_token_is_the_last_one(prefill: Client) -> None:
    """For any end token of the client: it is emitted, and no token follows."""
    free = await prefill.run(_prompt(2, 9), 10)
    ended = await prefill.run(_prompt(2, 9), 10, end_id=free.tokens[4])
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1] and ended.is_final


async def test_cancel_frees_blocks_within_a_second(decode: Client) -> None:
    """The blocks of a cancelled request are free soon afterwards."""
    call = decode.stream(request(_prompt(3, 100), 500))
    async for _ in call:
        break
    await _wait_for_load(decode, sequences_running=1)
    call.cancel()
    await _wait_idle(decode, 1.0)


async def test_stop_request_ends_the_one_with_its_id(decode: Client) -> None:
    """As in TensorRT-LLM: same id, stop set, a response without tensors."""
    running_one = asyncio.create_task(decode.run(_prompt(4, 20), 500, request_id="mine"))
    await _wait_for_load(decode, sequences_running=1)
    stop = await decode.run([1], 1, stop=True, request_id="mine")
    assert stop.messages == 0 and stop.error is None
    assert len((await running_one).tokens) < 500
    assert "request ID is not provided" in str((await decode.run([1], 1, stop=True, request_id="")).error)
    await _wait_idle(decode)


async def test_release_and_timeout_of_a_handoff(prefill: Client, decode: Client) -> None:
    """A release gets a response, is idempotent and takes effect at once; without a release the timeout ends the
    handoff.
    """
    prompt = _prompt(5, 50)
    first = await prefill.run(prompt, 4, "context_only")
    await _wait_for_load(prefill, handoffs_held=1, handoff_blocks=7)
    for _ in range(2):
        released = await prefill.run([1], 1, "release_handoff", handoff=first.handoff)
        assert released.is_final and released.tokens == [] and released.error is None
    await _wait_idle(prefill, 1.0)
    late = await decode.run(prompt, 4, "generation_only", handoff=first.handoff)
    assert "is unknown or expired at" in str(late.error)
    await prefill.run(prompt, 4, "context_only")
    await _wait_for_load(prefill, handoffs_held=1)
    await _wait_idle(prefill, 3.0)


async def test_an_unregistered_source_is_rejected(
    servers: tuple[Server, Server], prefill: Client, decode: Client
) -> None:
    """The decode engine dials the address in the request, not the one in the blob."""
    first = await prefill.run(_prompt(6, 20), 4, "context_only")
    refused = await decode.run(
        _prompt(6, 20), 4, "generation_only", handoff=first.handoff, kv_peer="127.0.0.1:9"
    )
    assert "handoff names a KV source that is not registered" in str(refused.error)
    taken = await decode.run(
        _prompt(6, 20), 4, "generation_only", handoff=first.handoff, kv_peer=servers[0].kv
    )
    assert taken.error is None and len(taken.tokens) == 4
    await _wait_idle(prefill)


async def test_bad_values_are_named_in_the_error(prefill: Client) -> None:
    """The error names the bad value."""
    assert "Invalid value for temperature: nan" in str(
        (await prefill.run([1], 4, temperature=float("nan"))).error
    )
    assert "exceeds max_sequence_tokens (4096)" in str((await prefill.run([1], 4096)).error)
    assert f"the pool has only {BLOCKS}" in str((await prefill.run([20] * 1000, 4)).error)


async def test_a_hundred_random_cancels_leak_nothing(prefill: Client, decode: Client) -> None:
    """For cancellations at random moments, both engines end up without held blocks."""
    rng = random.Random(8)

    async def doomed(seed: int) -> None:
        prompt = _prompt(seed % 7, 120)[: rng.randrange(1, 120)]
        try:
            async with asyncio.timeout(rng.random() * 0.2):
                first = await prefill.run(prompt, 60, "context_only")
                await decode.run(prompt, 60, "generation_only", handoff=first.handoff)
        except TimeoutError:
            pass

    for batch in range(10):
        async with asyncio.TaskGroup() as tasks:
            for index in range(10):
                tasks.create_task(doomed(10 * batch + index))
    await _wait_idle(decode, 5.0)
    await _wait_idle(prefill, 5.0)


async def test_events_replay_to_exactly_the_cache(prefill: Client) -> None:
    """Snapshot and events yield exactly the engine's prefix table: every reused block is known, and the count is the
    reported one.
    """
    cached: set[int] = set()
    async with aclosing(prefill.subscribe("kv_events")) as messages:
        snapshot = await _read_snapshot(messages, cached)
        event_id = snapshot["event_id"]
        prompts = [_prompt(900 + turn, 60 + turn) for turn in range(30)]
        for prompt in prompts:
            assert (await prefill.run(prompt, 3)).error is None
        report = await _wait_for_load(prefill, sequences_running=0)
        async with patience(3.0):
            last = chain_hashes(np.array(prompts[-1], dtype=np.int32), BLOCK_TOKENS, root_hash(b""))[-1]
            while last not in cached or len(cached) != report["blocks_cached"]:
                message = await anext(messages)
                assert message["boot_id"] == report["boot_id"] == snapshot["boot_id"]
                for event in message["events"]:
                    event_id += 1
                    assert event["event_id"] == event_id
                    _apply([event["data"]], cached)
    async with aclosing(prefill.subscribe("kv_events")) as messages:
        again: set[int] = set()
        await _read_snapshot(messages, again)
    assert again == cached


async def _read_snapshot(messages: AsyncIterator[dict[str, Any]], cached: set[int]) -> dict[str, Any]:
    """Apply all parts of a snapshot; return the last part."""
    while True:
        part: dict[str, Any] = await anext(messages)
        _apply(part["snapshot"], cached)
        if not part["more"]:
            return part


def _apply(events: list[dict[str, Any]], cached: set[int]) -> None:
    for data in events:
        if data["type"] == "stored":
            assert data["parent_hash"] is None or data["parent_hash"] in cached
            for block in data["blocks"]:
                assert len(block["tokens"]) == BLOCK_TOKENS
                cached.add(block["block_hash"])
        else:
            assert set(data["block_hashes"]) <= cached
            cached -= set(data["block_hashes"])


def _stubs(prefix: str) -> list[int]:
    """Return the process ids of stubs with this shared-memory prefix."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"triton_python_backend_stub") and any(
            prefix.encode() in word for word in words
        ):
            found.append(int(path.parent.name))
    return found


async def _gone(prefix: str) -> None:
    async with patience(5.0):
        while _stubs(prefix):
            await asyncio.sleep(0.05)


async def test_no_stub_survives_a_killed_server_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    """After kill -9 the stub ends by itself; a graceful stop works in spite of an open subscription."""
    server = launch(tmp_path / "a")
    server.wait_ready()
    assert _stubs(server.shm_prefix)
    server.kill()
    await _gone(server.shm_prefix)
    stale = Path("/dev/shm") / f"{server.shm_prefix}stale"
    stale.touch()
    again = launch(tmp_path / "b", f"--shm-prefix={server.shm_prefix}")
    try:
        again.wait_ready()
        assert not stale.exists()
        client = Client(again.grpc)
        async with aclosing(client.subscribe("load_report")) as reports:
            await anext(reports)
            again.process.terminate()
            with pytest.raises((AssertionError, grpc.aio.AioRpcError), match=r"shutting down|UNAVAILABLE"):
                async for _ in reports:
                    pass
        await client.close()
        # 1: tritonserver's own exit timeout passed, as it may on a busy machine. The server must not hang.
        assert await asyncio.to_thread(again.process.wait, 15.0) in (0, 1)
        await _gone(server.shm_prefix)
    finally:
        again.kill()
