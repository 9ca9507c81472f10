"""`kvmesh replay --cost-of` with the real mesh: a replay with the costs of its engines, learnt by its router."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from services.router.placement.cost_model import WINDOW
from simulator.cost import Cost
from tests.integration.generation import generate, token_request
from tests.integration.harness import Mesh, configure, running_mesh

pytestmark = pytest.mark.mesh

REPLAY = [sys.executable, "-m", "kvmesh.cli.main", "replay"]
TRACE = Path(__file__).resolve().parents[3] / "bench" / "traces" / "conversation_head.jsonl.gz"
PREFILL_S, TOKEN_S, TOKEN2_S = 0.01, 1e-4, 1e-8
"""Costs of the engines, large enough to dominate the time of a prompt on any machine."""

FEW, ENOUGH = 3, 130
PROMPT_TOKENS = (64, 1536)
OFF_MAX = 0.2
"""Largest relative error of the fit from the usual times of prompts of a size."""


async def replay(address: str, *options: str) -> tuple[int, str, str]:
    """Run the command on a few requests; return its status, stdout and stderr."""
    brief = ("--requests", "60", "--replicas", "2", "--load", ".7", "--policies", "kvmesh", "--jobs", "1")
    command = [*REPLAY, str(TRACE), "--cost-of", address, *brief, *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def serve(mesh: Mesh, prompts: int, rng: random.Random) -> list[tuple[int, float]]:
    """Compute prompts of all sizes without a shared prefix, one by one; return tokens and seconds of each."""
    taken = []
    for _ in range(prompts):
        tokens = round(PROMPT_TOKENS[0] * (PROMPT_TOKENS[1] / PROMPT_TOKENS[0]) ** rng.random())
        ids = [rng.randrange(5, 250) for _ in range(tokens)]
        answer = await generate(mesh.client(), token_request(ids, max_output_tokens=1, explain=True))
        assert answer.error is None and answer.finished is not None, answer.error
        (attempt,) = answer.finished.explanation.attempts
        taken.append((tokens, attempt.prefill.ToMicroseconds() / 1e6))
    return taken


async def test_a_replay_takes_the_costs_of_a_running_mesh(tmp_path: Path) -> None:
    """With too few prompts the command fails; then the seconds are those of the engines, and the table names their
    source.
    """
    config = configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 2048,
            "prefill_kv_blocks": 2048,
            "max_sequence_tokens": 4096,
            "prefill_s": PREFILL_S,
            "prefill_token_s": TOKEN_S,
            "prefill_token2_s": TOKEN2_S,
        },
        prefill={"replicas": 2},
        decode={"replicas": 1},
        router={"replicas": 1, "local_prefill_tokens_max": 0},
        frontend={"replicas": 1},
    )
    rng = random.Random(5)
    async with running_mesh(config, tmp_path) as mesh:
        router = mesh.parts["router-0"].address
        taken = await serve(mesh, FEW, rng)
        code, out, err = await replay(router)
        assert (code, out) == (2, "")
        assert f"router-0 has measured {FEW} prompts" in err and err.count("\n") == 1

        taken += await serve(mesh, ENOUGH - FEW, rng)
        code, out, err = await replay(router, "--json")
        assert code == 0, err
        code, table, err = await replay(router)
        assert code == 0, err
        code, _, err = await replay(mesh.parts["frontend-0"].address)
        assert code == 2 and "is not a router." in err
    told = json.loads(out)
    measured, cost = told["measured"], told["comparison"][0]["row"]["cost"]
    assert (measured["router"], measured["address"]) == ("router-0", router)
    assert (measured["prompts"], measured["fitted_prompts"]) == (ENOUGH, WINDOW)
    assert (
        PROMPT_TOKENS[0]
        <= measured["uncached_tokens"][0]
        <= measured["uncached_tokens"][1]
        <= PROMPT_TOKENS[1]
    )
    fitted = Cost("", cost["c0_s"], cost["a_s"], cost["b_s"])
    for low, high in pairwise((0, 128, 512, PROMPT_TOKENS[1] + 1)):
        ratios = [fitted.seconds(tokens, tokens) / took_s for tokens, took_s in taken if low <= tokens < high]
        assert abs(median(ratios) - 1) < OFF_MAX, (low, high, cost, taken)
    assert f"router-0 at {router} has measured {ENOUGH} prompts." in " ".join(table.split())
