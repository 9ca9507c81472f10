"""A decode pool of one engine with step frames and one without: the outputs do not depend on the replica."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from kvmesh.triton.capabilities import offers_step_frames
from kvmesh.triton.client import TritonClient
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.drawn_transports import DRAW
from tests.integration.generation import generate_all, token_request
from tests.integration.harness import Mesh, configure

pytestmark = pytest.mark.mesh

OFFERS = {"prefill-0-engine": True, "decode-0-engine": False, "decode-1-engine": True}
REQUESTS, TOKENS = 24, 16


async def test_engines_with_and_without_step_frames_share_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local and disaggregated prompts, sampled: both decode replicas run some, with the tokens of the arithmetic alone."""
    monkeypatch.setattr(DRAW, "step_frames", "on")
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.002, "max_sequence_tokens": 1024},
        prefill={"replicas": 1},
        decode={"replicas": 2},
    )
    chance = random.Random(6)
    plan = [
        Stream(
            number,
            "",
            0.0,
            tuple(chance.randrange(4, 500) for _ in range(chance.choice((8, 120)))),
            TOKENS,
            seed=number,
            temperature=1.0,
            top_k=0,
            is_plain=False,
            frontend=0,
        )
        for number in range(REQUESTS)
    ]
    truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
    wanted = await asyncio.to_thread(lambda: [truth.tokens(one) for one in plan])
    requests = [
        token_request(one.prompt, max_output_tokens=TOKENS, temperature=1.0, seed=one.seed, explain=True)
        for one in plan
    ]
    mesh = Mesh(config, tmp_path)
    for name, offers in OFFERS.items():
        if not offers:
            mesh.parts[name].command = [*mesh.parts[name].command, "--no-step-frames"]
    try:
        await mesh.start()
        assert {name: await _offers(mesh.parts[name].address) for name in OFFERS} == OFFERS
        logged = {name: _logged(mesh.parts[name.removesuffix("-engine")].log) for name in OFFERS}
        assert logged == OFFERS
        answers = await generate_all(mesh.client(), requests, concurrency=8, timeout_s=60)
        await mesh.idle(10)
    finally:
        await mesh.stop()
    assert [answer.error for answer in answers] == [None] * REQUESTS
    assert [answer.ids for answer in answers] == wanted
    attempts = [
        attempt
        for answer in answers
        if answer.finished is not None
        for attempt in answer.finished.explanation.attempts
    ]
    assert {attempt.decode_replica for attempt in attempts} == {"decode-0", "decode-1"}


async def _offers(address: str) -> bool:
    """Return whether the engine at `address` offers step frames."""
    client = TritonClient(address)
    try:
        metadata, config = await client.describe()
    finally:
        await client.close()
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return offers_step_frames({one.name: one.datatype for one in metadata.outputs}, parameters)


def _logged(log: Path) -> bool:
    """Return whether a replica says at its start that its engine sends step frames."""
    lines = (msgspec.json.decode(line) for line in log.read_text().splitlines() if line.startswith("{"))
    (serving,) = (line for line in lines if line.get("event") == "serving")
    return bool(serving["step_frames"])
