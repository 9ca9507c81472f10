"""Engines that make token ids outside the vocabulary, or refuse valid requests, are ejected; no request
fails.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import generate_all, token_request
from tests.integration.harness import Mesh, configure, until

pytestmark = pytest.mark.mesh


async def test_lying_engines_of_both_roles_are_ejected_and_no_request_fails(tmp_path: Path) -> None:
    """Lying engines of both roles are ejected as outliers, and no request fails.

    One of two prefill engines makes foreign ids. One of two decode engines refuses in the middle of streams.
    """
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.002},
        prefill={"replicas": 2},
        decode={"replicas": 2},
        router={"local_prefill_tokens_max": 0},
    )
    draw = random.Random(4)
    plan = [
        Stream(
            number,
            "",
            0.0,
            tuple(draw.randrange(4, 500) for _ in range(draw.randint(40, 200))),
            20,
            seed=number,
            temperature=1.0,
            top_k=0,
            is_plain=False,
            frontend=0,
        )
        for number in range(48)
    ]
    mesh = Mesh(config, tmp_path)
    for name, options in (
        ("prefill-0-engine", ("--lie", "tokens")),
        ("decode-0-engine", ("--lie", "refuse", "--lie-after", "5")),
    ):
        mesh.parts[name].command = [*mesh.parts[name].command, *options]
    try:
        await mesh.start()
        requests = [
            token_request(one.prompt, max_output_tokens=one.max_output_tokens, temperature=1.0, seed=one.seed)
            for one in plan
        ]
        answers = await generate_all(mesh.client(), requests, concurrency=8, timeout_s=60)
        assert [answer.error for answer in answers] == [None] * len(plan)
        truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
        wanted = await asyncio.to_thread(lambda: [truth.tokens(one) for one in plan])
        assert [answer.ids for answer in answers] == wanted

        async def are_ejected() -> bool:
            status = await mesh.status("router-0")
            failed = {each.replica for each in status.replicas if each.ejected or each.failure_count}
            assert failed <= {"prefill-0", "decode-0"}, failed
            return bool(failed == {"prefill-0", "decode-0"} and status.ejection_total >= 2)

        await until(are_ejected, 5, "both liars are ejected")
        await mesh.idle(10)
    finally:
        await mesh.stop()
