"""Penalties, biases, minimum lengths, end tokens, guided output and top logprobs through a lost decode replica."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import ModelTokenizer
from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import Mesh, configure, running_mesh, until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

CONFIG = configure(
    engine={"arithmetic": "transformer"},
    prefill={"replicas": 1},
    decode={"replicas": 2},
)
TOKENIZER = ModelTokenizer.load(CONFIG.mesh.model_path)
END = TOKENIZER.end_token_ids[0]
ITEM = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "minItems": 12, "maxItems": 12, "items": ITEM})


def asked(output: int = 90, temperature: float = 0.8, **fields: Any) -> pb.GenerateRequest:
    """Return a request with sampling parameters."""
    ids = TOKENIZER.encode("It was a fine morning, and Elizabeth")
    request = token_request(ids, max_output_tokens=output, seed=11, temperature=temperature, explain=True)
    request.sampling.MergeFrom(pb.Sampling(**fields))
    return request


def no_token_often(answer: Answer) -> None:
    """A presence penalty of 2 and a frequency penalty of 2 make repeats rare."""
    assert len(set(answer.ids)) > 0.8 * len(answer.ids)


def no_end(answer: Answer) -> None:
    """No end token among the first tokens, although it is the most likely one."""
    assert END not in answer.ids[:60] and answer.ids[60] == END


def ends_at_stop(answer: Answer) -> None:
    assert answer.finished is not None
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP_TOKEN
    assert TOKENIZER.token(answer.ids[-1]) == "."


def is_of_schema(answer: Answer) -> None:
    values = json.loads(answer.text)
    assert len(values) == 12 and all(10 <= each["n"] <= 99 for each in values)


def is_of_regex(answer: Answer) -> None:
    words = answer.text.split(" ")
    assert len(words) == 20 and all(2 <= len(word) <= 6 and word.islower() for word in words)


FEATURES: dict[str, tuple[pb.GenerateRequest, Callable[[Answer], None]]] = {
    "penalties": (asked(frequency_penalty=2, presence_penalty=2, repetition_penalty=1.1), no_token_often),
    "min_tokens": (asked(logit_bias={END: 100}, min_tokens=60), no_end),
    "schema": (asked(400, guide=pb.Guide(json_schema=SCHEMA)), is_of_schema),
    "regex": (asked(400, guide=pb.Guide(regex="[a-z]{2,6}( [a-z]{2,6}){19}")), is_of_regex),
    "greedy schema": (asked(400, 0.0, guide=pb.Guide(json_schema=SCHEMA)), is_of_schema),
}


async def test_a_stream_with_each_feature_goes_on_exactly(tmp_path: Path) -> None:
    """The decode replica is killed at a random token. Tokens, alternatives and the end are those of a quiet run."""
    draw = random.Random(5)
    async with running_mesh(CONFIG, tmp_path) as mesh:
        for name, (request, check) in FEATURES.items():
            request.options.top_logprobs = 2
            wanted = await generate(mesh.client(), request)
            assert wanted.error is None and wanted.finished is not None, wanted
            check(wanted)
            killed = await broken(mesh, request, draw.randint(2, len(wanted.ids) // 2))
            assert (killed.ids, killed.text) == (wanted.ids, wanted.text), name
            assert killed.finished is not None
            assert killed.finished.finish_reason == wanted.finished.finish_reason
            assert len(killed.finished.explanation.attempts) == 2, name


async def broken(mesh: Mesh, request: pb.GenerateRequest, at: int) -> Answer:
    """Return the answer to `request`, whose decode replica is killed once `at` tokens came, and started again."""
    count = 0

    def note(answer: Answer) -> None:
        nonlocal count
        count = len(answer.ids)

    reading = asyncio.create_task(generate(mesh.client(), request, on_tokens=note))
    await until(lambda: count >= at, 30, f"{at} tokens")
    loads = {name: (await mesh.status(name)).load_report for name in ("decode-0", "decode-1")}
    (busy,) = [name for name, load in loads.items() if load.running_request_count]
    await mesh.parts[busy].end()
    answer = await reading
    await mesh.start(busy)
    return answer
