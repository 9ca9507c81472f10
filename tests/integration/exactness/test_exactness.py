"""Exactness: the tokens of a request do not depend on its replica, on its batch or on the prefix cache.

Each prompt runs once alone on an engine without prefix reuse, and once in a mesh at concurrency 32. The caches of the
mesh are so small that blocks are evicted all the time. `make test` runs a subset, `make exactness` all.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvmesh.config import MeshConfig
from tests.integration.exactness.prompts import Case, cases
from tests.integration.generation import Answer, generate_all
from tests.integration.harness import configure, running_engine, running_mesh
from tests.integration.oracle import Oracle

pytestmark = pytest.mark.mesh

SEED = 20261120
CONCURRENCY = 32
REPEATS_MAX = 10
"""Runs of the longest prompt after all others, at most."""


def mesh_config(arithmetic: str) -> MeshConfig:
    """A mesh of two prefill and two decode replicas with caches far smaller than the prompts."""
    return configure(
        # 2,048 tokens are 64 blocks: a cache of 96 (prefill) has space for one and a half long prompts.
        engine={
            "arithmetic": arithmetic,
            "kv_blocks": 160,
            "prefill_kv_blocks": 96,
            "max_sequence_tokens": 2304,
        },
        prefill={"engine_concurrency": 2},
        frontend={"default_deadline_s": 600.0},
    )


async def run(
    arithmetic: str, chosen: list[Case], folder: Path
) -> tuple[list[Case], list[list[int]], list[Answer]]:
    """Return the cases that ran, the oracle's tokens, and the mesh's outputs.

    The longest prompt runs again after all others, until a replica has taken it from its cache: each of the four
    replicas may compute it once.
    """
    config = mesh_config(arithmetic)
    end_token_id = json.loads((config.mesh.model_path / "config.json").read_text())["eos_token_id"]
    longest = max(chosen, key=lambda case: len(case.ids))
    ran = list(chosen)
    async with running_engine(config, folder, "--no-prefix-reuse") as address:
        oracle = Oracle(address, end_token_id)
        expected = [await oracle.generate(case.ids, case.request) for case in ran]
        await oracle.close()
    async with running_mesh(config, folder) as mesh:
        # Not all at once: later requests must reuse cached blocks of earlier ones.
        concurrency = min(CONCURRENCY, len(chosen) // 3)
        requests = [case.request for case in chosen]
        answers = await generate_all(mesh.client(), requests, concurrency=concurrency, timeout_s=600)
        await mesh.idle(10)
        for _ in range(REPEATS_MAX):
            answers += await generate_all(mesh.client(), [longest.request], concurrency=1, timeout_s=600)
            ran.append(longest)
            expected.append(expected[chosen.index(longest)])
            await mesh.idle(10)
            if cached_count(answers):
                break
        return ran, expected, answers


def cached_count(answers: list[Answer]) -> int:
    """Return the prompt tokens that prefill and decode replicas took from their caches: decode runs some prompts alone."""
    return sum(one.finished.usage.cached_token_count for one in answers if one.finished is not None)


def check(ran: list[Case], expected: list[list[int]], answers: list[Answer]) -> None:
    """Assert that every output is complete and equal to the oracle's, token by token."""
    wrong = []
    for index, (case, tokens, answer) in enumerate(zip(ran, expected, answers, strict=True)):
        assert answer.error is None, f"case {index} of seed {SEED}: {answer.error}"
        assert answer.started is not None and answer.started.prompt_token_count == len(case.ids)
        if answer.ids != tokens:
            first = next(
                (at for at, pair in enumerate(zip(answer.ids, tokens, strict=False)) if pair[0] != pair[1]),
                -1,
            )
            wrong.append(f"case {index}: {len(case.ids)} prompt tokens, first difference at {first}")
    assert not wrong, f"seed {SEED}: {len(wrong)} of {len(ran)} differ:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("arithmetic", "count"), [("hashed", 30), ("transformer", 9)])
async def test_mesh_equals_engine_alone(arithmetic: str, count: int, tmp_path: Path) -> None:
    """A subset of the cases with the longest prompt is equal, token by token."""
    chosen = list(cases(_tokenizer(), count, SEED))
    ran, expected, answers = await run(arithmetic, chosen, tmp_path)
    check(ran, expected, answers)
    # Without prefix hits the run would say nothing about caches.
    assert cached_count(answers) > 0


@pytest.mark.exactness
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arithmetic", ["hashed", "transformer"])
async def test_mesh_equals_engine_alone_for_all(arithmetic: str, tmp_path: Path) -> None:
    """200 prompts and more are equal, token by token."""
    chosen = list(cases(_tokenizer(), 240, SEED + 1))
    ran, expected, answers = await run(arithmetic, chosen, tmp_path)
    check(ran, expected, answers)
    tokens = sum(len(ids) for ids in expected)
    print(
        f"\n{arithmetic}: {len(ran)} prompts, {tokens} tokens equal; {cached_count(answers)} prompt tokens from caches"
    )


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.exactness)])
async def test_engine_alone_equals_recompute_without_cache(count: int, tmp_path: Path) -> None:
    """Short prompts: each token of the engine equals the token computed from the whole history without a cache."""
    chosen = list(cases(_tokenizer(), 2 + count, SEED + 2, longest=48))[2:]
    config = mesh_config("transformer")
    model = config.mesh.model_path
    end_token_id = json.loads((model / "config.json").read_text())["eos_token_id"]
    async with running_engine(config, tmp_path) as address:
        oracle = Oracle(address, end_token_id)
        got = [await oracle.generate(case.ids, case.request) for case in chosen]
        await oracle.close()
    wanted = await asyncio.to_thread(_recompute, model, chosen, end_token_id)
    assert got == wanted


def _recompute(model: Path, chosen: list[Case], end_token_id: int) -> list[list[int]]:
    from tests.integration.exactness.recompute import recompute

    return [recompute(model, case.ids, case.request, end_token_id) for case in chosen]


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MeshConfig().mesh.model_path / "tokenizer.json"))
