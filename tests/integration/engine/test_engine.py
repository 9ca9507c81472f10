"""The engine through a real tritonserver, as its clients use it."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engines.contract.tensors import INPUTS, OUTPUTS
from engines.reference.block_pool import chain_hashes, root_hash
from tests.integration.engine.behaviours import (
    SAMPLED,
    a_stop_ends_the_request_with_its_id,
    answers_equal_the_arithmetic,
    cancel_a_hundred_at_random,
    prompt_of,
)
from tests.integration.engine.conftest import BLOCK_TOKENS, BLOCKS
from tests.integration.engine.servers import Client, Server, launch, request
from tests.integration.engine.subscriptions import apply, read_snapshot, wait_for_load
from tests.patience import patience

LOWEST = 16
"""Lowest token id of a prompt."""


async def _wait_idle(client: Client, timeout_s: float = 3.0) -> None:
    await wait_for_load(
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


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_disaggregated_equals_aggregated_equals_no_reuse(
    prefill: Client, decode: Client, options: Mapping[str, Any]
) -> None:
    """Under concurrency and eviction, aggregated and disaggregated requests give the same tokens."""
    await answers_equal_the_arithmetic(prefill, decode, LOWEST, options)
    await _wait_idle(prefill)
    await _wait_idle(decode)


async def test_perf_metrics_report_the_prefix_hit(prefill: Client) -> None:
    """The second time all full blocks are reused, except the block of the recomputed last token."""
    prompt = prompt_of(500, 5 * BLOCK_TOKENS)
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
    answer = await prefill.run(prompt_of(1, 9), 5, streaming=False, return_log_probs=True)
    assert answer.messages == 1 and answer.is_final and len(answer.tokens) == 5
    assert answer.first["sequence_length"].tolist() == [[5]]
    assert answer.first["output_log_probs"].shape == (1, 1, 5)
    assert np.allclose(answer.first["cum_log_probs"], answer.first["output_log_probs"].sum())


async def test_the_end_token_is_the_last_one(prefill: Client) -> None:
    """For any end token of the client: it is emitted, and no token follows."""
    free = await prefill.run(prompt_of(2, 9), 10)
    ended = await prefill.run(prompt_of(2, 9), 10, end_id=free.tokens[4])
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1] and ended.is_final


async def test_cancel_frees_blocks_within_a_second(decode: Client) -> None:
    """The blocks of a cancelled request are free soon afterwards."""
    call = decode.stream(request(prompt_of(3, 100), 500))
    async for _ in call:
        break
    await wait_for_load(decode, sequences_running=1)
    call.cancel()
    await _wait_idle(decode, 1.0)


async def test_stop_request_ends_the_one_with_its_id(decode: Client) -> None:
    """As in TensorRT-LLM: same id, stop set, a response without tensors."""
    await a_stop_ends_the_request_with_its_id(decode, LOWEST)
    await _wait_idle(decode)


async def test_release_and_timeout_of_a_handoff(prefill: Client, decode: Client) -> None:
    """A release gets a response, is idempotent and takes effect at once; without a release the timeout ends the
    handoff.
    """
    prompt = prompt_of(5, 50)
    first = await prefill.run(prompt, 4, "context_only")
    await wait_for_load(prefill, handoffs_held=1, handoff_blocks=7)
    for _ in range(2):
        released = await prefill.run([1], 1, "release_handoff", handoff=first.handoff)
        assert released.is_final and released.tokens == [] and released.error is None
    await _wait_idle(prefill, 1.0)
    late = await decode.run(prompt, 4, "generation_only", handoff=first.handoff)
    assert "is unknown or expired at" in str(late.error)
    await prefill.run(prompt, 4, "context_only")
    await wait_for_load(prefill, handoffs_held=1)
    await _wait_idle(prefill, 3.0)


async def test_an_unregistered_source_is_rejected(
    servers: tuple[Server, Server], prefill: Client, decode: Client
) -> None:
    """The decode engine dials the address in the request, not the one in the blob."""
    first = await prefill.run(prompt_of(6, 20), 4, "context_only")
    refused = await decode.run(
        prompt_of(6, 20), 4, "generation_only", handoff=first.handoff, kv_peer="127.0.0.1:9"
    )
    assert "handoff names a KV source that is not registered" in str(refused.error)
    taken = await decode.run(
        prompt_of(6, 20), 4, "generation_only", handoff=first.handoff, kv_peer=servers[0].kv
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
    await cancel_a_hundred_at_random(prefill, decode, LOWEST)
    await _wait_idle(decode, 5.0)
    await _wait_idle(prefill, 5.0)


async def test_events_replay_to_exactly_the_cache(prefill: Client) -> None:
    """Snapshot and events yield exactly the engine's prefix table: every reused block is known, and the count is the
    reported one.
    """
    cached: set[int] = set()
    async with aclosing(prefill.subscribe("kv_events")) as messages:
        snapshot = await read_snapshot(messages, cached, BLOCK_TOKENS)
        event_id = snapshot["event_id"]
        prompts = [prompt_of(900 + turn, 60 + turn) for turn in range(30)]
        for prompt in prompts:
            assert (await prefill.run(prompt, 3)).error is None
        report = await wait_for_load(prefill, sequences_running=0)
        async with patience(3.0):
            last = chain_hashes(np.array(prompts[-1], dtype=np.int32), BLOCK_TOKENS, root_hash(b""))[-1]
            while last not in cached or len(cached) != report["blocks_cached"]:
                message = await anext(messages)
                assert message["boot_id"] == report["boot_id"] == snapshot["boot_id"]
                for event in message["events"]:
                    event_id += 1
                    assert event["event_id"] == event_id
                    apply([event["data"]], cached, BLOCK_TOKENS)
    async with aclosing(prefill.subscribe("kv_events")) as messages:
        again: set[int] = set()
        await read_snapshot(messages, again, BLOCK_TOKENS)
    assert again == cached


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
