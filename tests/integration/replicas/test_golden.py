"""Golden prompts on a real prefill and a real decode replica: equal tokens, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from controlplane.golden_runner import GoldenRunner
from controlplane.rollouts.golden import compare, fixed_prompts
from controlplane.rollouts.golden_schedule import GoldenRun
from controlplane.rollouts.view import GoldenState
from kvmesh.clock import MonotonicClock
from tests.integration.harness import until
from tests.integration.replicas.test_replicas import CLEAN_S, CONFIG, Pair, running_pair
from tests.one_redis import ONE_REDIS

pytestmark = [pytest.mark.mesh, ONE_REDIS]


def golden_run(pair: Pair, role: str) -> GoldenRun:
    """Return a run of the fixed set on a replica of the pair, any boot of it."""
    part = pair.prefill if role == "prefill" else pair.decode
    prompts = fixed_prompts(256, CONFIG.engine.max_sequence_tokens)
    version = CONFIG.engine.salt
    return GoldenRun(
        "r-1", 0, "next", "", "", role, part.address, version, CONFIG.engine.block_tokens, prompts
    )


async def test_decode_and_prefill_give_the_same_tokens_and_hold_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    """Twice on decode, the second time from its cache, and the first tokens on prefill."""
    runner = GoldenRunner(
        "control-0", "c1", MonotonicClock(), lambda address, _role: grpc.aio.insecure_channel(address)
    )
    async with running_pair(tmp_path, redis_url) as pair:
        run = golden_run(pair, "decode")
        first, second = await runner.run(run), await runner.run(run)
        expected = [answer.token_ids for answer in first]
        assert all(len(tokens) == 16 for tokens in expected)
        assert compare(run.prompts, expected, second, is_first_only=False).state is GoldenState.GREEN
        prefill = await runner.run(golden_run(pair, "prefill"))
        assert compare(run.prompts, expected, prefill, is_first_only=True).state is GoldenState.GREEN
        await until(pair.is_clean, CLEAN_S, "no slot, no block and no engine call is left")
