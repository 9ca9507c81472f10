"""Penalties, biases, early ends, guides: what each does, and that a resumed request goes on exactly."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.contract.errors import EngineError
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import Adjustments, SamplingParams
from engines.reference.adjustments import adjusted, allow_only
from engines.reference.config import EngineConfig
from engines.reference.loading import load_guide_compiler
from engines.reference.sampling import sample_token, top_log_probabilities
from kvmesh.config import ROOT
from kvmesh.models.tokenizer import ModelTokenizer

MODEL = ROOT / "engines/reference/model"
VOCABULARY = 50


def naive(
    logits: list[float],
    one: Adjustments,
    prompt: list[int],
    output: list[int],
    generated: int,
    ends: set[int],
) -> list[float]:
    """Return adjusted logits, one by one: the formulas of OpenAI (frequency, presence) and CTRL (repetition)."""
    made = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt or token in output:
            value = value / one.repetition_penalty if value > 0 else value * one.repetition_penalty
        count = output.count(token)
        value -= one.frequency_penalty * count + one.presence_penalty * (count > 0)
        if one.bias is not None:
            value += float(one.bias[token])
        made.append(float("-inf") if token in ends and generated < one.output_tokens_min else value)
    return made


@pytest.mark.parametrize("seed", range(50))
def test_adjusted_logits_are_those_of_a_slow_reference(seed: int) -> None:
    """For random parameters and histories; the given logits stay as they are."""
    draw = random.Random(seed)
    logits = np.array([draw.gauss(0, 3) for _ in range(VOCABULARY)])
    one = Adjustments(
        frequency_penalty=draw.choice((0.0, draw.uniform(-2, 2))),
        presence_penalty=draw.choice((0.0, draw.uniform(-2, 2))),
        repetition_penalty=draw.choice((1.0, draw.uniform(0.5, 2))),
        bias=draw.choice((None, np.array([draw.uniform(-9, 9) for _ in range(VOCABULARY)], np.float32))),
        output_tokens_min=draw.choice((0, 3, 9)),
    )
    tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))]
    start = draw.randint(0, len(tokens))
    ends = set(draw.sample(range(VOCABULARY), draw.randint(0, 3)))
    kept = logits.copy()
    made = adjusted(logits, one, np.array(tokens, np.int32), start, len(tokens) - start, frozenset(ends))
    wanted = naive(logits.tolist(), one, tokens[:start], tokens[start:], len(tokens) - start, ends)
    assert np.allclose(made, wanted) and np.array_equal(logits, kept)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    """A bias changes the choice, and not the reported probability."""
    logits = np.array([0.0, 1.0, 2.0])
    token, value = sample_token(logits, 0, SamplingParams(log_probs=True), np.array([9.0, 1.0, 2.0]))
    ids, values = top_log_probabilities(logits, 2)
    assert token == 0 and ids == [2, 1]
    total = np.exp(logits).sum()
    assert np.isclose(value, np.log(1 / total)) and np.allclose(values, np.log(np.exp([2, 1]) / total))


def transformer() -> EngineConfig:
    """Return the configuration of an engine with the committed model."""
    return EngineConfig("transformer", model_dir=str(MODEL), kv_blocks=64)


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Return the compiler of guides of the committed model."""
    made = load_guide_compiler(transformer())
    assert made is not None
    return made


def test_the_hashed_arithmetic_has_no_guides() -> None:
    """It has no tokenizer."""
    assert load_guide_compiler(EngineConfig("hashed")) is None


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable schema"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable schema"),
        ("json_schema", '{"type": "foo"}', "Invalid type"),
        ("json_schema", '{"not": {}}', "Unimplemented keys"),
        ("json_schema", '{"$ref": "#/nowhere"}', "does not exist"),
        ("json_schema", '{"type": ', "Expecting value"),
        ("json_schema", "[" * 9999, "recursion"),
        ("json_schema", '{"enum": ["' + "x" * 70_000 + '"]}', "bytes; allowed are 65536"),
        ("json_schema", '{"type": "integer", "multipleOf": 99991, "minimum": 3}', "fuel exhausted"),
        ("regex", "(a|", "unclosed group"),
        ("regex", r"(\w)\1", "backreferences are not supported"),
        ("regex", "(?=x)y", "look-around"),
        ("ebnf_grammar", "start: nowhere", "nowhere"),
    ],
)
def test_a_guide_that_cannot_be_met_is_refused(compiler: Any, kind: str, text: str, reason: str) -> None:
    """With the field and the reason."""
    with pytest.raises(EngineError, match="guided_decoding_guide") as caught:
        compiler(GuideText(GuideKind(kind), text))
    assert reason.lower() in str(caught.value).lower()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "regex", ["(a{1,9}){1,9}" * 9, "((((a{1,99}){1,99}){1,99}){1,99}){1,99}", ".*a.{300}", "(.*a){40}"]
)
def test_a_regular_expression_that_explodes_is_bounded(compiler: Any, regex: str) -> None:
    """It is refused, or it makes masks; the limits of llguidance bound both."""
    try:
        guide = compiler(GuideText(GuideKind.REGEX, regex))
        for _ in range(50):
            allowed = guide.allowed()
            guide.consume(int(np.flatnonzero(allowed)[0]))
            if guide.is_over:
                break
    except EngineError as error:
        assert "guided_decoding_guide" in str(error)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("seed", range(20))
def test_guided_random_tokens_make_what_the_schema_says(compiler: Any, seed: int) -> None:
    """Whatever the model prefers. A guide that is compiled again and fed the same tokens allows the same tokens."""
    draw, tokens = random.Random(seed), list[int]()
    text = GuideText(GuideKind.JSON_SCHEMA, SCHEMA)
    guide = compiler(text)
    while not guide.is_over:
        allowed = guide.allowed()
        if draw.random() < 0.2:
            again = compiler(text)
            for token in tokens:
                again.consume(token)
            assert np.array_equal(again.allowed(), allowed)
        choices = np.flatnonzero(allowed).tolist()
        short = [each for each in choices if each < 300] or choices
        tokens.append(draw.choice(short))
        guide.consume(tokens[-1])
    made = json.loads(ModelTokenizer.load(MODEL).decode(tokens))
    assert set(made) == {"name", "age"} and isinstance(made["age"], int)


def test_minus_infinity_is_never_drawn() -> None:
    """At any temperature."""
    logits = allow_only(np.array([5.0, 1.0, 4.0]), np.array([False, True, False]))
    for position in range(100):
        for sampling in (SamplingParams(), SamplingParams(temperature=9.0), SamplingParams(1.0, 2, 0.9)):
            assert sample_token(logits, position, replace(sampling, seed=position))[0] == 1
