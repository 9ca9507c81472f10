"""Capabilities and refusals of stock models, by their recorded metadata (`recorded/`, each with its source)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from kvmesh.triton.capabilities import ModelFacts, ModelRefused, derive
from kvmesh.triton.fact_sources import NO, NO_METRICS, ConfiguredFacts, MetricsFound
from kvmesh.triton.server_metrics import ServerMetrics

RECORDED = Path(__file__).parent / "recorded"
GIVEN = ConfiguredFacts(block_tokens=64, kv_blocks=9000, max_sequence_tokens=8192, vocab_size=128_256)
METRICS = MetricsFound("gpu-0:8002", ServerMetrics(blocks_total=7000, block_tokens=64))
ASLEEP = MetricsFound("gpu-0:8002", ServerMetrics())
UNREACHABLE = MetricsFound("gpu-0:8002", None, "no answer within 1 s")


def derived(
    name: str,
    role: str = "decode",
    given: ConfiguredFacts = GIVEN,
    found: MetricsFound = NO_METRICS,
    parameters: Mapping[str, str] = {},
) -> ModelFacts:
    """Return the facts of a recorded model with further `parameters`."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    metadata: Any = service_pb2.ModelMetadataResponse(name="tensorrt_llm")
    for kind in ("inputs", "outputs"):
        for tensor, datatype in recorded[kind].items():
            getattr(metadata, kind).add(name=tensor, datatype=datatype)
    config = model_config_pb2.ModelConfig(max_batch_size=recorded["max_batch_size"])
    config.model_transaction_policy.decoupled = recorded["decoupled"]
    for key, value in {**recorded["parameters"], **parameters}.items():
        config.parameters[key].string_value = value
    return derive(
        metadata, config, role=role, model_version="llama-1", block_tokens=64, configured=given, metrics=found
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_cpp_backend_serves_with_what_the_operator_tells(role: str) -> None:
    """Without events, load reports, releases, an end token, guides, and a promise that handoffs work."""
    facts = derived("cpp_backend", role)
    assert facts.capabilities.names() == [
        "disaggregated",
        "logit_bias",
        "logprobs",
        "min_tokens",
        "penalties",
    ]
    assert (facts.tokens_per_block, facts.kv_blocks) == (64, 9000)
    assert (facts.max_sequence_tokens, facts.vocab_size) == (8192, 128_256)
    assert facts.model_version == "llama-1" and facts.tries_handoffs and facts.stop and not facts.load_report


def test_metrics_tell_what_neither_model_nor_operator_tell() -> None:
    """Sizes of the KV cache."""
    facts = derived("cpp_backend", given=replace(GIVEN, block_tokens=None, kv_blocks=None), found=METRICS)
    assert (facts.tokens_per_block, facts.kv_blocks) == (64, 7000)


def test_guides_need_a_backend_for_them() -> None:
    """The stock model lists their inputs in any case."""
    assert derived(
        "cpp_backend", parameters={"guided_decoding_backend": "xgrammar"}
    ).capabilities.guided_output
    for unset in ("", "${guided_decoding_backend}"):
        assert not derived(
            "cpp_backend", parameters={"guided_decoding_backend": unset}
        ).capabilities.guided_output


@pytest.mark.parametrize(
    ("told", "is_disaggregated", "is_tried"),
    [("true", True, False), ("false", False, False), ("", True, True)],
)
def test_a_model_may_say_whether_handoffs_work(told: str, is_disaggregated: bool, is_tried: bool) -> None:
    """One that says nothing is tried."""
    facts = derived("cpp_backend", parameters={"disaggregated": told})
    assert (facts.capabilities.disaggregated, facts.tries_handoffs) == (is_disaggregated, is_tried)


@pytest.mark.parametrize(
    ("parameters", "has_end_token"),
    [
        ({}, False),
        ({"end_token": "true"}, True),
        ({"end_token": "false", "engine": "{}"}, False),
        ({"engine": "{}"}, True),
        ({"seeded_resume": "true"}, True),
    ],
)
def test_the_end_token_of_an_output(parameters: dict[str, str], has_end_token: bool) -> None:
    """A model says it. Those of release 0.1.0 do not, and have it."""
    assert derived("cpp_backend", parameters=parameters).capabilities.end_token == has_end_token


def test_the_longest_sequence_is_the_smaller_one() -> None:
    """The key is a limit of the mesh. A model that tells its own is never asked for more."""
    for own, given, expected in ((4096, 8192, 4096), (8192, 4096, 4096), (4096, None, 4096)):
        limits = replace(GIVEN, max_sequence_tokens=given)
        facts = derived("cpp_backend", given=limits, parameters={"max_sequence_tokens": str(own)})
        assert facts.max_sequence_tokens == expected


NO_PARAMETER = "the model has no such parameter"
NEITHER = f"{NO_PARAMETER}, and neither --engine-metrics nor engine.metrics_port is set"
SILENT = f"{NO_PARAMETER}, and http://gpu-0:8002/metrics does not tell it"
DEAD = f"{NO_PARAMETER}, and http://gpu-0:8002/metrics cannot be read (no answer within 1 s)"
TOKENS = (
    "input input_ids; input input_lengths; input request_output_len; {streaming}output output_ids; "
    "output sequence_length; {more}"
)
FACTS = replace(GIVEN, block_tokens=None, kv_blocks=None)
CASES: list[tuple[str, str, ConfiguredFacts, MetricsFound, dict[str, str], str]] = [
    (
        "cpp_backend",
        "decode",
        ConfiguredFacts(),
        NO_METRICS,
        {},
        (
            f"it lacks: tokens_per_block ({NEITHER}; set engine.block_tokens); kv_blocks ({NEITHER}; "
            "set engine.kv_blocks); "
            f"max_sequence_tokens ({NO_PARAMETER}; set engine.max_sequence_tokens); vocab_size ({NO_PARAMETER}; set "
            "engine.vocab_size)"
        ),
    ),
    (
        "cpp_backend",
        "decode",
        replace(GIVEN, kv_blocks=None),
        ASLEEP,
        {},
        f"it lacks: kv_blocks ({SILENT}; set engine.kv_blocks)",
    ),
    (
        "cpp_backend",
        "prefill",
        replace(GIVEN, kv_blocks=None, kv_blocks_key="engine.prefill_kv_blocks"),
        UNREACHABLE,
        {},
        f"it lacks: kv_blocks ({DEAD}; set engine.prefill_kv_blocks)",
    ),
    (
        "cpp_backend",
        "decode",
        GIVEN,
        METRICS,
        {},
        "its sources differ: kv_blocks is 9000 by engine.kv_blocks and 7000 by http://gpu-0:8002/metrics",
    ),
    (
        "cpp_backend",
        "decode",
        GIVEN,
        METRICS,
        {"kv_blocks": "6000", "vocab_size": "32000"},
        (
            "its sources differ: kv_blocks is 6000 by the model's parameter kv_blocks, 9000 by engine.kv_blocks and "
            "7000 by "
            "http://gpu-0:8002/metrics; vocab_size is 32000 by the model's parameter vocab_size and 128256 by "
            "engine.vocab_size"
        ),
    ),
    (
        "cpp_backend",
        "decode",
        GIVEN,
        replace(METRICS, metrics=ServerMetrics(block_tokens=32)),
        {},
        "it lacks: tokens_per_block 64, the engine.block_tokens of the mesh (it has 32)",
    ),
    (
        "cpp_backend",
        "prefill",
        replace(GIVEN, disaggregated=NO),
        NO_METRICS,
        {},
        'it lacks: engine.disaggregated = "auto" (it is "no", with which no prefill replica is needed)',
    ),
    (
        "cpp_backend",
        "decode",
        GIVEN,
        NO_METRICS,
        {"model_version": "llama-2"},
        'it lacks: model_version "llama-1", the version by engine.salt or [versions.NAME] (it has "llama-2")',
    ),
    (
        "llm_api",
        "decode",
        GIVEN,
        NO_METRICS,
        {},
        "it lacks: " + TOKENS.format(streaming="", more="model_transaction_policy { decoupled: true }"),
    ),
    (
        "vllm_backend",
        "decode",
        GIVEN,
        NO_METRICS,
        {},
        "it lacks: " + TOKENS.format(streaming="input streaming; ", more="max_batch_size of at least 1"),
    ),
    (
        "vllm_backend",
        "prefill",
        GIVEN,
        NO_METRICS,
        {},
        "it lacks: "
        + TOKENS.format(streaming="input streaming; ", more="max_batch_size of at least 1; ")
        + "input and output context_phase_params (disaggregated prefill), which prefill needs",
    ),
]


@pytest.mark.parametrize(("name", "role", "given", "found", "parameters", "text"), CASES)
def test_each_refusal_is_one_sentence(
    name: str,
    role: str,
    given: ConfiguredFacts,
    found: MetricsFound,
    parameters: dict[str, str],
    text: str,
) -> None:
    """With everything that is wrong, and the key that puts it right."""
    with pytest.raises(ModelRefused) as refused:
        derived(name, role, given, found, parameters)
    assert str(refused.value) == f"The model tensorrt_llm cannot serve {role}; {text}."


def test_only_missing_sizes_of_the_cache_may_come_with_the_first_iteration() -> None:
    """Then the replica sends one request, and reads the metrics again."""
    with pytest.raises(ModelRefused) as refused:
        derived("cpp_backend", given=FACTS, found=ASLEEP)
    assert refused.value.lacks_metrics
    with pytest.raises(ModelRefused) as refused:
        derived("cpp_backend", given=replace(GIVEN, vocab_size=None), found=ASLEEP)
    assert not refused.value.lacks_metrics
