"""Capabilities of an engine, derived from the metadata and configuration of its Triton model. Pure.

Nothing is assumed. Only inputs that the model has are sent. A model without a feature that its role needs is refused with
one error that lists all missing features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

PREFILL: Final = "prefill"


class ModelRefused(Exception):
    """The model cannot serve this role. The text is one sentence with the list of missing features."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of the engine. Each missing feature has a fallback.

    - without `disaggregated`: decode runs every prompt itself.
    - without `kv_events`: routers infer the cached blocks from their dispatches and measured hits, within `kv_blocks`.
    - without `release_handoff`: an abandoned handoff stays until its transfer timeout.
    - without `logprobs`: no log-probabilities are returned.
    - without `seeded_resume`: a resumed request may continue with other tokens.
    - without `penalties`, `logit_bias`, `min_tokens`, `top_logprobs` or `guided_output`: requests that need it are refused.
    - without `guided_resume`: a guided request whose engine is lost ends, instead of going on behind its output.
    """

    disaggregated: bool = False
    kv_events: bool = False
    release_handoff: bool = False
    logprobs: bool = False
    seeded_resume: bool = False
    penalties: bool = False
    logit_bias: bool = False
    min_tokens: bool = False
    top_logprobs: bool = False
    guided_output: bool = False
    guided_resume: bool = False

    def names(self) -> list[str]:
        """Return the names of the features that the engine has, sorted."""
        return sorted(name for name in self.__slots__ if getattr(self, name))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of an engine's model that a service needs. Sizes are in tokens and blocks."""

    capabilities: Capabilities
    tokens_per_block: int
    kv_blocks: int
    max_sequence_tokens: int
    vocab_size: int
    kv_address: str
    """Address from which the engine's KV blocks can be pulled, "host:port". Empty: unknown."""
    model_version: str
    load_report: bool
    """The engine reports its load on a long-lived stream."""
    stop: bool
    """A running request can be ended by another request with its id."""
    inputs: frozenset[str]
    outputs: frozenset[str]
    max_sequences: int = 0
    """Requests that the engine runs at once. Further requests wait in its queue. 0: unknown."""
    digest: str = ""
    """Digest of weights or salt, and of the vocabulary. Engines with equal digests can exchange KV. Empty: unknown."""


def differences(known: ModelFacts, found: ModelFacts) -> str:
    """Return the facts that differ, with both values. Empty: none does."""
    return "; ".join(
        f"{each.name} was {getattr(known, each.name)}, is {getattr(found, each.name)}"
        for each in fields(ModelFacts)
        if getattr(known, each.name) != getattr(found, each.name)
    )


DIGEST_CHARACTERS_MAX: Final = 256
"""A longer digest of an engine is cut: each lease of the replica holds it."""

_REQUIRED_INPUTS: Final = ("input_ids", "input_lengths", "request_output_len", "streaming")
_REQUIRED_OUTPUTS: Final = ("output_ids", "sequence_length")
_TYPES: Final = {
    "input_ids": "INT32",
    "input_lengths": "INT32",
    "request_output_len": "INT32",
    "streaming": "BOOL",
    "stop": "BOOL",
    "end_id": "INT32",
    "temperature": "FP32",
    "runtime_top_p": "FP32",
    "runtime_top_k": "INT32",
    "seed": "UINT64",
    "return_log_probs": "BOOL",
    "return_perf_metrics": "BOOL",
    "frequency_penalty": "FP32",
    "presence_penalty": "FP32",
    "repetition_penalty": "FP32",
    "min_tokens": "INT32",
    "embedding_bias": "FP32",
    "stop_words_list": "INT32",
    "return_top_log_probs": "INT32",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
    "top_log_prob_ids": "INT32",
    "top_log_probs": "FP32",
    "context_phase_params": "UINT8",
    "output_ids": "INT32",
    "output_log_probs": "FP32",
    "kv_events": "UINT8",
    "load_report": "UINT8",
}
_NUMBERS: Final = ("tokens_per_block", "kv_blocks", "max_sequence_tokens", "vocab_size")


def derive(metadata: Any, config: Any, *, role: str, model_version: str, block_tokens: int) -> ModelFacts:
    """Return the facts and capabilities of the model.

    `metadata`: Triton's ModelMetadataResponse. `config`: its ModelConfig. `model_version` and `block_tokens` are those of
    the mesh. Raises ModelRefused with all features that `role` ("prefill" or "decode") lacks.
    """
    inputs = {one.name: one.datatype for one in metadata.inputs}
    outputs = {one.name: one.datatype for one in metadata.outputs}
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    missing: list[str] = []
    _check_tensors(inputs, outputs, missing)
    if not config.model_transaction_policy.decoupled:
        missing.append("model_transaction_policy { decoupled: true }")
    if config.max_batch_size < 1:
        missing.append("max_batch_size of at least 1")
    numbers = {name: _number(parameters, name, missing) for name in _NUMBERS}
    capabilities = _capabilities(inputs, outputs, parameters)
    facts = ModelFacts(
        capabilities=capabilities,
        tokens_per_block=numbers["tokens_per_block"],
        kv_blocks=numbers["kv_blocks"],
        max_sequence_tokens=numbers["max_sequence_tokens"],
        vocab_size=numbers["vocab_size"],
        kv_address=parameters.get("kv_address", ""),
        model_version=parameters.get("model_version", ""),
        load_report="load_report" in outputs,
        stop="stop" in inputs,
        inputs=frozenset(inputs),
        outputs=frozenset(outputs),
        max_sequences=_optional_number(parameters, "max_batch_sequences"),
        digest=parameters.get("engine_digest", "")[:DIGEST_CHARACTERS_MAX],
    )
    if role == PREFILL and not capabilities.disaggregated:
        missing.append("input and output context_phase_params (disaggregated prefill), which prefill needs")
    if facts.model_version != model_version:
        missing.append(f'parameter model_version "{model_version}" (it has "{facts.model_version}")')
    if facts.tokens_per_block and facts.tokens_per_block != block_tokens:
        missing.append(f"parameter tokens_per_block {block_tokens} (it has {facts.tokens_per_block})")
    if missing:
        raise ModelRefused(f"The model {metadata.name} cannot serve {role}; it lacks: {'; '.join(missing)}.")
    return facts


def _check_tensors(inputs: Mapping[str, str], outputs: Mapping[str, str], missing: list[str]) -> None:
    for what, names, tensors in (
        ("input", _REQUIRED_INPUTS, inputs),
        ("output", _REQUIRED_OUTPUTS, outputs),
    ):
        missing.extend(f"{what} {name}" for name in names if name not in tensors)
        for name, kind in tensors.items():
            if name in _TYPES and kind != _TYPES[name]:
                missing.append(f"{what} {name} of type {_TYPES[name]} (it is {kind})")


def _number(parameters: Mapping[str, str], name: str, missing: list[str]) -> int:
    text = parameters.get(name, "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    missing.append(f"parameter {name} as a whole number above 0" + (f' (it is "{text}")' if text else ""))
    return 0


def _optional_number(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "")
    return int(text) if text.isdecimal() else 0


def _capabilities(
    inputs: Mapping[str, str], outputs: Mapping[str, str], parameters: Mapping[str, str]
) -> Capabilities:
    says: Callable[[str], bool] = lambda name: parameters.get(name, "").lower() == "true"  # noqa: E731
    disaggregated = "context_phase_params" in inputs and "context_phase_params" in outputs
    has_guides = inputs.keys() >= {"guided_decoding_guide_type", "guided_decoding_guide"}
    return Capabilities(
        disaggregated=disaggregated,
        kv_events="kv_events" in outputs,
        release_handoff=disaggregated and says("release_handoff"),
        logprobs="return_log_probs" in inputs and "output_log_probs" in outputs,
        seeded_resume="seed" in inputs and says("seeded_resume"),
        penalties=inputs.keys() >= {"frequency_penalty", "presence_penalty", "repetition_penalty"},
        logit_bias="embedding_bias" in inputs,
        min_tokens="min_tokens" in inputs,
        top_logprobs="return_top_log_probs" in inputs
        and outputs.keys() >= {"top_log_prob_ids", "top_log_probs"},
        guided_output=has_guides,
        guided_resume=has_guides and says("output_start"),
    )
