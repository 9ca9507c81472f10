"""Torch engines in real tritonservers give the tokens of the decoder itself, alone and as a pair. Skipped without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from engines.reference.arithmetic import ChosenToken, ChunkInput
from engines.reference.config import EngineConfig
from engines.reference.loading import load_arithmetic
from tests.integration.engine.servers import Client, Server, launch

pytest.importorskip("torch")

OPTIONS = (
    *("--arithmetic=torch", "--torch-shape=test", "--device=cpu", "--dtype=float32"),
    *("--kv-blocks=96", "--block-tokens=16", "--max-step-tokens=64"),
)
OUTPUT = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two engines with the same weights."""
    folder = tmp_path_factory.mktemp("torch")
    started = [launch(folder / name, *OPTIONS) for name in ("p", "d")]
    try:
        for server in started:
            server.wait_ready()
        yield started[0], started[1]
    finally:
        for server in started:
            server.kill()


def wanted(prompt: list[int]) -> list[int]:
    """Return the greedy tokens of the decoder in this process, recomputed for each token."""
    model, _ = load_arithmetic(
        EngineConfig("torch", torch_shape="test", device="cpu", dtype="float32", block_tokens=16)
    )
    tokens = list(prompt)
    for _ in range(OUTPUT):
        pages = np.arange(-(-len(tokens) // 16), dtype=np.int32)
        whole = ChunkInput(np.array(tokens, np.int32), 0, pages, True, True)
        (row,) = model.forward([whole], model.new_store(len(pages), 16))
        assert isinstance(row, ChosenToken)
        tokens.append(row.token)
    return tokens[len(prompt) :]


async def test_a_pair_gives_the_tokens_of_one_engine(pair: tuple[Server, Server]) -> None:
    """Aggregated, disaggregated, and many at once with prompts in several chunks: the same greedy tokens."""
    draw = random.Random(9)
    prompts = [[draw.randrange(16, 4096) for _ in range(length)] for length in (3, 16, 70, 200)]
    expected = [wanted(prompt) for prompt in prompts]
    prefill, decode = (Client(server.grpc) for server in pair)
    try:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert (await decode.run(prompt, OUTPUT)).tokens == tokens
            first = await prefill.run(prompt, OUTPUT, "context_only")
            assert first.handoff is not None and first.tokens == tokens[:1]
            rest = await decode.run(prompt, OUTPUT, "generation_only", handoff=first.handoff)
            assert rest.error is None and rest.tokens == tokens
        together = await asyncio.gather(*(prefill.run(prompt, OUTPUT) for prompt in prompts * 3))
        assert [answer.tokens for answer in together] == expected * 3
        sampled = await prefill.run(prompts[0], OUTPUT, temperature=1.0, seed=5, return_log_probs=True)
        assert sampled.error is None and len(sampled.tokens) == OUTPUT and sampled.tokens != expected[0]
    finally:
        await prefill.close()
        await decode.close()
