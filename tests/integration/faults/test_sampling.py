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
from tests.integration.harness import Mesh, Part, configure, running_mesh, until

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "transformer"},
    prefill={"replicas": 1},
    decode={"replicas": 2},
    frontend={"replicas": 2},
)
TOKENIZER = ModelTokenizer.load(CONFIG.mesh.model_path)
END = TOKENIZER.end_token_ids[0]
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
    """The stop token ends the answer, long before its limit."""
    assert answer.finished is not None and 40 < len(answer.ids) < 90
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
    "stop tokens": (asked(ignore_eos=True), ends_at_stop),  # the test chooses the token
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
        whole = (await generate(mesh.client(), FEATURES["stop tokens"][0])).ids
        stop = next(token for at, token in enumerate(whole) if at > 45 and token not in whole[:at])
        FEATURES["stop tokens"][0].sampling.stop_token_ids.append(stop)
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
    assert (answer.ids, answer.text, answer.top_ids) == (wanted.ids, wanted.text, wanted.top_ids), name
    assert len(answer.top_ids) == len(answer.ids) and all(len(each) == 2 for each in answer.top_ids), name
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
        return dataclasses.replace(rest, text=first.text + rest.text, top_ids=first.top_ids + rest.top_ids)

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
    for name in ("decode-0", "decode-1") * 2:
        part, is_dead = mesh.parts[name], False

        def kill(answer: Answer, part: Part = part) -> None:
            nonlocal is_dead
            if not is_dead and len(answer.ids) >= at:
                is_dead = True
                assert part.process is not None
                part.process.kill()  # at once: the answer goes on meanwhile

        answer = await generate(mesh.client(), request, on_tokens=kill)
        await part.end()
        await mesh.start(name)
        if answer.finished is not None and len(answer.finished.explanation.attempts) > 1:
            return answer
    raise AssertionError(f"no decode replica was killed in the middle of {request}")
