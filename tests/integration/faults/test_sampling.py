"""Penalties, biases, minimum lengths, end tokens, guided output and top logprobs through a lost decode replica."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
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
    frontend={"replicas": 2},
)
TOKENIZER = ModelTokenizer.load(CONFIG.mesh.model_path)
END = TOKENIZER.end_token_ids[0]
STOP = TOKENIZER.encode("d.")[-1]
COMMAS = [each for each in range(TOKENIZER.vocab_size) if "," in TOKENIZER.decode([each])]
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
    """The first full stop ends the answer, as the stop token that it is."""
    assert answer.finished is not None and answer.ids.index(STOP) == len(answer.ids) - 1 >= 4
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP_TOKEN


def is_unended(answer: Answer) -> None:
    """The end token, made likely, is an output token like others."""
    assert answer.finished is not None and END in answer.ids and len(answer.ids) == 90
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH


def has_no_comma(answer: Answer) -> None:
    assert "," not in answer.text and len(answer.ids) == 90


def is_of_schema(answer: Answer) -> None:
    values = json.loads(answer.text)
    assert len(values) == 12 and all(10 <= each["n"] <= 99 for each in values)


def is_of_regex(answer: Answer) -> None:
    words = answer.text.split(" ")
    assert len(words) == 20 and all(2 <= len(word) <= 6 and word.islower() for word in words)


FEATURES: dict[str, tuple[pb.GenerateRequest, Callable[[Answer], None]]] = {
    "penalties": (asked(frequency_penalty=2, presence_penalty=2, repetition_penalty=1.1), no_token_often),
    "stop tokens": (asked(400, stop_token_ids=[STOP]), ends_at_stop),
    "biases": (asked(logit_bias=dict.fromkeys([*COMMAS, END], -100.0)), has_no_comma),
    "ignored end": (asked(logit_bias={END: 9}, ignore_eos=True), is_unended),
    "min_tokens": (asked(logit_bias={END: 100}, min_tokens=60), no_end),
    "schema": (asked(400, guide=pb.Guide(json_schema=SCHEMA)), is_of_schema),
    "regex": (asked(400, guide=pb.Guide(regex="[a-z]{2,6}( [a-z]{2,6}){19}")), is_of_regex),
    "greedy schema": (asked(400, 0.0, guide=pb.Guide(json_schema=SCHEMA)), is_of_schema),
}


async def test_a_stream_with_each_feature_goes_on_exactly(tmp_path: Path) -> None:
    """Tokens, text and end are those of a quiet run, after the death of a decode replica at a random token, of the
    frontend, and of both at once.
    """
    draw = random.Random(5)
    async with running_mesh(CONFIG, tmp_path) as mesh:
        wanted: dict[str, Answer] = {}
        for name, (request, check) in FEATURES.items():
            request.options.top_logprobs = 2
            wanted[name] = await generate(mesh.client(), request)
            assert wanted[name].error is None, wanted[name]
            check(wanted[name])
        for name, (request, _) in FEATURES.items():
            killed = await broken(mesh, request, draw.randint(2, len(wanted[name].ids) // 2))
            _assert_equal(name, killed, wanted[name])
            assert killed.finished is not None and len(killed.finished.explanation.attempts) == 2, name
        assert "replica lost" in mesh.parts["router-0"].log.read_text()
        log = mesh.parts["frontend-0"].log.read_text()
        assert log.count("stream resumed") == len(FEATURES)
        for at, other, more in (
            ("frontend-0", "frontend-1", ()),
            ("frontend-1", "frontend-0", ("decode-0", "decode-1")),
        ):
            for name, answer in (await moved(mesh, at, other, more)).items():
                _assert_equal(name, answer, wanted[name])
            log = mesh.parts[other].log.read_text()
            assert log.count('"by_client": true') == len(FEATURES)


def _assert_equal(name: str, answer: Answer, wanted: Answer) -> None:
    assert (answer.ids, answer.text) == (wanted.ids, wanted.text), name
    assert answer.finished is not None and wanted.finished is not None, name
    assert answer.finished.finish_reason == wanted.finished.finish_reason, name


async def moved(mesh: Mesh, at: str, other: str, more: Sequence[str]) -> dict[str, Answer]:
    """Return the answers to streams of all features, whose frontend `at`, and the parts `more`, die once each has a token.

    Each client resumes at the frontend `other`. All dead parts run again at the end.
    """
    counts = dict.fromkeys(FEATURES, 0)

    async def read(name: str, request: pb.GenerateRequest) -> Answer:
        first = await generate(
            mesh.client(at), request, on_tokens=lambda so_far: counts.update({name: len(so_far.ids)})
        )
        assert first.error is not None and first.started is not None, f"{name} was not broken"
        request = copy.deepcopy(request)
        request.options.resume.resume_token = first.started.resume_token
        request.options.resume.received_token_ids.extend(first.ids)
        rest = await generate(mesh.client(other), request, first=first.ids)
        return dataclasses.replace(rest, text=first.text + rest.text)

    reading = {name: asyncio.create_task(read(name, request)) for name, (request, _) in FEATURES.items()}
    await until(lambda: all(counts.values()), 30, "a token of each stream")
    dead = (at, *more)
    await asyncio.gather(*(mesh.parts[name].end() for name in dead))
    if more:
        await mesh.start(*more)
    answers = {name: await task for name, task in reading.items()}
    await mesh.start(at)
    return answers


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
