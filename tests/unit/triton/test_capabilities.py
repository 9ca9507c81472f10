"""Capabilities derived from a model's metadata and configuration, and refused models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from kvmesh.triton.capabilities import Capabilities, ModelRefused, derive, differences
from tests.unit.triton.fake_engine import facts

INPUTS = {
    "input_ids": "INT32",
    "input_lengths": "INT32",
    "request_output_len": "INT32",
    "streaming": "BOOL",
    "stop": "BOOL",
    "seed": "UINT64",
    "return_log_probs": "BOOL",
    "context_phase_params": "UINT8",
}
OUTPUTS = {
    "output_ids": "INT32",
    "sequence_length": "INT32",
    "context_phase_params": "UINT8",
    "output_log_probs": "FP32",
    "kv_events": "UINT8",
    "load_report": "UINT8",
}
PARAMETERS = {
    "tokens_per_block": "32",
    "kv_blocks": "512",
    "max_sequence_tokens": "4096",
    "vocab_size": "4096",
    "kv_address": "127.0.0.1:7000",
    "max_batch_sequences": "64",
    "model_version": "v1",
    "release_handoff": "true",
    "seeded_resume": "true",
}


def model(
    inputs: dict[str, str] = INPUTS,
    outputs: dict[str, str] = OUTPUTS,
    parameters: dict[str, str] = PARAMETERS,
    *,
    decoupled: bool = True,
    max_batch_size: int = 1,
) -> tuple[service_pb2.ModelMetadataResponse, model_config_pb2.ModelConfig]:
    """Return Triton's metadata and configuration of a model."""
    metadata = service_pb2.ModelMetadataResponse(name="tensorrt_llm")
    for name, datatype in inputs.items():
        metadata.inputs.add(name=name, datatype=datatype, shape=[-1, 1])
    for name, datatype in outputs.items():
        metadata.outputs.add(name=name, datatype=datatype, shape=[-1, 1])
    config = model_config_pb2.ModelConfig(name="tensorrt_llm", max_batch_size=max_batch_size)
    config.model_transaction_policy.decoupled = decoupled
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return metadata, config


def without(tensors: dict[str, str], *names: str) -> dict[str, str]:
    """Return `tensors` without `names`."""
    return {name: kind for name, kind in tensors.items() if name not in names}


@pytest.mark.parametrize("told", ["", "many", None])
def test_the_number_of_concurrent_sequences_is_optional(told: str | None) -> None:
    """If the parameter is missing or unreadable, the number is unknown."""
    parameters = without(PARAMETERS, "max_batch_sequences") | (
        {} if told is None else {"max_batch_sequences": told}
    )
    facts = derive(*model(parameters=parameters), role="prefill", model_version="v1", block_tokens=32)
    assert facts.max_sequences == 0


def test_a_complete_model_has_every_capability() -> None:
    """Every capability and every number of the reference engine is found."""
    facts = derive(*model(), role="prefill", model_version="v1", block_tokens=32)
    assert facts.capabilities == Capabilities(True, True, True, True, True, end_token=True)
    assert facts.capabilities.names() == [
        "disaggregated",
        "end_token",
        "kv_events",
        "logprobs",
        "release_handoff",
        "seeded_resume",
    ]
    assert (facts.tokens_per_block, facts.kv_blocks, facts.max_sequences) == (32, 512, 64)
    assert (facts.max_sequence_tokens, facts.vocab_size) == (4096, 4096)
    assert facts.kv_address == "127.0.0.1:7000" and facts.load_report and facts.stop


@pytest.mark.parametrize(
    ("lost", "inputs", "outputs", "parameters"),
    [
        ("kv_events", INPUTS, without(OUTPUTS, "kv_events"), PARAMETERS),
        ("logprobs", without(INPUTS, "return_log_probs"), OUTPUTS, PARAMETERS),
        ("logprobs", INPUTS, without(OUTPUTS, "output_log_probs"), PARAMETERS),
        ("seeded_resume", without(INPUTS, "seed"), OUTPUTS, PARAMETERS),
        ("seeded_resume", INPUTS, OUTPUTS, without(PARAMETERS, "seeded_resume")),
        ("release_handoff", INPUTS, OUTPUTS, without(PARAMETERS, "release_handoff")),
    ],
)
def test_a_missing_optional_part_costs_only_its_capability(
    lost: str, inputs: dict[str, str], outputs: dict[str, str], parameters: dict[str, str]
) -> None:
    """A model without an optional part serves, without that capability."""
    facts = derive(*model(inputs, outputs, parameters), role="prefill", model_version="v1", block_tokens=32)
    missing = {"disaggregated", "kv_events", "logprobs", "release_handoff", "seeded_resume"} - set(
        facts.capabilities.names()
    )
    assert missing == {lost}


def test_decode_serves_without_disaggregation_and_prefill_does_not() -> None:
    """A stock aggregated model can decode, running every prompt itself."""
    aggregated = model(without(INPUTS, "context_phase_params"), without(OUTPUTS, "context_phase_params"))
    facts = derive(*aggregated, role="decode", model_version="v1", block_tokens=32)
    assert not facts.capabilities.disaggregated and not facts.capabilities.release_handoff
    with pytest.raises(ModelRefused, match="context_phase_params"):
        derive(*aggregated, role="prefill", model_version="v1", block_tokens=32)


def test_one_refusal_lists_all_missing_parts() -> None:
    """The operator sees all faults at once."""
    bad = model(
        without(INPUTS, "input_lengths") | {"seed": "INT32"},
        without(OUTPUTS, "sequence_length"),
        without(PARAMETERS, "kv_blocks") | {"vocab_size": "many", "model_version": "v2"},
        decoupled=False,
        max_batch_size=0,
    )
    with pytest.raises(ModelRefused) as refused:
        derive(*bad, role="decode", model_version="v1", block_tokens=16)
    text = str(refused.value)
    for part in (
        "input input_lengths",
        "input seed of type UINT64 (it is INT32)",
        "output sequence_length",
        "decoupled",
        "max_batch_size",
        "kv_blocks",
        'vocab_size as a whole number above 0 (it is "many")',
        'model_version "v1", the version by engine.salt or [versions.NAME] (it has "v2")',
        "tokens_per_block 16, the engine.block_tokens of the mesh (it has 32)",
    ):
        assert part in text, part


def test_the_digest_of_an_engine_is_unknown_unless_it_says_one() -> None:
    """An engine of release 0.1.0 has no such parameter. A long one is cut: each lease holds it."""
    assert derive(*model(), role="decode", model_version="v1", block_tokens=32).digest == ""
    for digest, kept in (("hashed-1", "hashed-1"), ("x" * 10_000, "x" * 256)):
        parameters = PARAMETERS | {"engine_digest": digest}
        facts = derive(*model(parameters=parameters), role="decode", model_version="v1", block_tokens=32)
        assert facts.digest == kept


def test_facts_that_differ_are_named() -> None:
    """With both values."""
    known = facts()
    assert differences(known, facts()) == ""
    found = replace(known, kv_blocks=known.kv_blocks + 1, stop=not known.stop)
    assert differences(known, found) == (
        f"kv_blocks was {known.kv_blocks}, is {found.kv_blocks}; stop was {known.stop}, is {found.stop}"
    )
