"""`kvmesh replay --cost-of` with the real mesh: a replay with what its engines take, learnt by its router."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

from services.router.replay.cost import Cost
from tests.integration.generation import generate, token_request
from tests.integration.harness import Mesh, configure, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

REPLAY = [sys.executable, "-m", "kvmesh.cli.main", "replay"]
TRACE = Path(__file__).resolve().parents[3] / "bench" / "traces" / "conversation_head.jsonl.gz"
PREFILL_S, TOKEN_S, TOKEN2_S = 0.02, 2e-4, 5e-8
"""What the engines take; so that most of the time of a prompt is theirs and not the machine's."""

FEW, ENOUGH = 3, 48
PROMPT_TOKENS = (64, 2048)
OFF_MAX = 0.35
"""Share of the engine's own seconds by which the fit may be off, on a machine that does other things as well."""


async def replay(address: str, *options: str) -> tuple[int, str, str]:
    """Run the command on a few requests; return its status, stdout and stderr."""
    brief = ("--requests", "60", "--replicas", "2", "--load", ".7", "--policies", "kvmesh", "--jobs", "1")
    command = [*REPLAY, str(TRACE), "--cost-of", address, *brief, *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def serve(mesh: Mesh, prompts: int, rng: random.Random) -> None:
    """Let the mesh compute prompts of all sizes that share nothing, one after the other."""
    for _ in range(prompts):
        tokens = round(PROMPT_TOKENS[0] * (PROMPT_TOKENS[1] / PROMPT_TOKENS[0]) ** rng.random())
        ids = [rng.randrange(5, 250) for _ in range(tokens)]
        answer = await generate(mesh.client(), token_request(ids, max_output_tokens=1))
        assert answer.error is None, answer.error


async def test_a_replay_takes_the_costs_of_a_running_mesh(tmp_path: Path) -> None:
    """Too few prompts are refused; then the seconds are the engines', and the table says whose they are."""
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
        await serve(mesh, FEW, rng)
        code, out, err = await replay(router)
        assert (code, out) == (2, "")
        assert f"router-0 has measured {FEW} prompts" in err and err.count("\n") == 1

        await serve(mesh, ENOUGH - FEW, rng)
        code, out, err = await replay(router, "--json")
        assert code == 0, err
        code, table, err = await replay(router)
        assert code == 0, err
        code, _, err = await replay(mesh.parts["frontend-0"].address)
        assert code == 2 and "is no router." in err
    told = json.loads(out)
    measured, cost = told["measured"], told["comparison"][0]["row"]["cost"]
    assert (measured["router"], measured["address"]) == ("router-0", router)
    assert (measured["prompts"], measured["fitted_prompts"]) == (ENOUGH, ENOUGH)
    assert (
        PROMPT_TOKENS[0]
        <= measured["uncached_tokens"][0]
        <= measured["uncached_tokens"][1]
        <= PROMPT_TOKENS[1]
    )
    fitted = Cost("", cost["c0_s"], cost["a_s"], cost["b_s"])
    for tokens in (128, 512, 2048):
        own_s = PREFILL_S + tokens * TOKEN_S + tokens * tokens * TOKEN2_S
        assert abs(fitted.seconds(tokens, tokens) / own_s - 1) < OFF_MAX, (tokens, cost)
    assert f"router-0 at {router} has measured {ENOUGH} prompts." in " ".join(table.split())
