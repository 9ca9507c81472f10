"""Behaviours that every engine of the contract shows to its clients; each engine's suite runs them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from engines.contract.request import SamplingParams
from tests.integration.engine.servers import Client
from tests.integration.engine.subscriptions import wait_for_load
from tests.unit.engine.engines import CONFIG, running

SAMPLED: Final[Mapping[str, Any]] = {"temperature": 0.9, "runtime_top_p": 0.9, "seed": 11}


def drawn(*, log_probs: bool = False, top: int = 0) -> SamplingParams:
    """Return SAMPLED as an engine reads it: FP32 tensors, so not exactly 0.9."""
    return SamplingParams(float(np.float32(0.9)), 0, float(np.float32(0.9)), 11, log_probs, top)


def prompt_of(seed: int, length: int, lowest: int = 16) -> list[int]:
    """Return a prompt of ids in [lowest, 4096)."""
    return random.Random(seed).choices(range(lowest, 4096), k=length)


async def answers_equal_the_arithmetic(
    prefill: Client, decode: Client, lowest: int, options: Mapping[str, Any]
) -> None:
    """Under concurrency and eviction, aggregated and disaggregated requests give the tokens of the arithmetic.

    `options`: nothing (greedy), or SAMPLED.
    """
    prompts = [
        prompt_of(seed % 5, 40, lowest)[: 20 + seed] + prompt_of(100 + seed, 1 + seed * 3, lowest)
        for seed in range(20)
    ]

    async def disaggregated(prompt: list[int]) -> list[int]:
        first = await prefill.run(prompt, 12, "context_only", **options)
        assert first.error is None and first.messages == 1 and first.is_final and first.handoff is not None
        rest = await decode.run(prompt, 12, "generation_only", handoff=first.handoff, **options)
        assert rest.error is None and rest.tokens[:1] == first.tokens
        return rest.tokens

    async with asyncio.TaskGroup() as tasks:
        apart = [tasks.create_task(disaggregated(prompt)) for prompt in prompts]
        whole = [tasks.create_task(decode.run(prompt, 12, **options)) for prompt in prompts]
    sampling = drawn() if options else SamplingParams()
    with running(CONFIG, prefix_reuse=False) as oracle:
        for prompt, one, other in zip(prompts, apart, whole, strict=True):
            expected = oracle.run(np.array(prompt, dtype=np.int32), 12, sampling=sampling).tokens
            assert one.result() == other.result().tokens == expected


async def a_stop_ends_the_request_with_its_id(decode: Client, lowest: int) -> None:
    """As in TensorRT-LLM: same id, stop set, a response without tensors."""
    running_one = asyncio.create_task(decode.run(prompt_of(4, 20, lowest), 500, request_id="mine"))
    await wait_for_load(decode, sequences_running=1)
    stop = await decode.run([1], 1, stop=True, request_id="mine")
    assert stop.messages == 0 and stop.error is None
    assert len((await running_one).tokens) < 500
    assert "request ID is not provided" in str((await decode.run([1], 1, stop=True, request_id="")).error)


async def cancel_a_hundred_at_random(prefill: Client, decode: Client, lowest: int) -> None:
    """Cancel disaggregated requests at random moments."""
    rng = random.Random(8)

    async def doomed(seed: int) -> None:
        prompt = prompt_of(seed % 7, 120, lowest)[: rng.randrange(1, 120)]
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
