"""An engine that omits the end token from its output, as TensorRT-LLM's C++ backend does: the mesh's outputs have it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import Answer, generate_all, token_request
from tests.integration.harness import configure, running_mesh

pytestmark = pytest.mark.mesh

MAX_TOKENS, END_PROBABILITY = 12, 0.15
SHORT, LONG = 8, 80
"""Prompt lengths: the decode replica runs the short ones itself, the long ones come with a handoff."""


async def test_outputs_without_their_end_token_are_complete(tmp_path: Path) -> None:
    """Each output is the oracle's: some are the end token alone, some end early, some at their limit."""
    config = configure(
        engine={"arithmetic": "hashed", "max_sequence_tokens": 1024},
        prefill={"replicas": 1},
        decode={"replicas": 1},
        # KV transfer is expensive, so the router runs prompts at decode if it may.
        router={"local_prefill_tokens_max": SHORT, "transfer_block_us": 50_000.0},
    )
    end_token = int(json.loads((config.mesh.model_path / "config.json").read_text())["eos_token_id"])
    truth = Truth(config.engine.salt, 1024, end_token=end_token, end_probability=END_PROBABILITY)
    rng = random.Random(10)
    prompts = [
        [rng.randrange(16, 4096) for _ in range(length)] for length in (SHORT, LONG) for _ in range(40)
    ]
    wanted = [
        truth.tokens(Stream(0, "", 0.0, tuple(prompt), MAX_TOKENS, 1, 0.0, 0, False, 0)) for prompt in prompts
    ]
    requests = [
        token_request(prompt, max_output_tokens=MAX_TOKENS, explain=True, logprobs=True) for prompt in prompts
    ]
    options = (
        *("--end-token", str(end_token), "--end-probability", str(END_PROBABILITY)),
        "--hide-end-token",
    )
    async with running_mesh(config, tmp_path, options) as mesh:
        answers = await generate_all(mesh.client(), requests, concurrency=16)
        await mesh.idle(10)
    kinds = set()
    for tokens, answer in zip(wanted, answers, strict=True):
        assert answer.error is None, answer.error
        assert answer.ids == tokens
        assert answer.finished is not None
        reason = answer.finished.finish_reason
        is_end = tokens[-1] == end_token
        assert reason == (pb.FINISH_REASON_END_TOKEN if is_end else pb.FINISH_REASON_LENGTH)
        assert answer.finished.usage.output_token_count == len(tokens)
        end = "the end token alone" if tokens == [end_token] else pb.FinishReason.Name(reason)
        kinds.add((ran_at_decode(answer), end))
    assert len(kinds) == 6, kinds  # local and disaggregated prefill, each with the three ends


def ran_at_decode(answer: Answer) -> bool:
    """Return whether the decode replica ran the prompt itself; no attempt was lost."""
    assert answer.finished is not None
    (attempt,) = answer.finished.explanation.attempts
    return not attempt.prefill_replica
