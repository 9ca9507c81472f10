"""Capabilities of an engine, derived from the metadata and configuration of its Triton model. Pure.

Nothing is assumed. Only inputs that the model has are sent. A model without a feature that its role needs is refused with
one error that lists all missing features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from kvmesh.triton import step_frames
from kvmesh.triton.fact_sources import NO, NO_METRICS, NOTHING, ConfiguredFacts, FactSources, MetricsFound

PREFILL: Final = "prefill"


class ModelRefused(Exception):
    """The model cannot serve this role. The text is one sentence with the list of missing features."""

    def __init__(self, text: str, *, lacks_metrics: bool = False) -> None:
        """`lacks_metrics`: Triton's /metrics may tell a missing fact after the engine's first iteration."""
        super().__init__(text)
        self.lacks_metrics = lacks_metrics


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
    - without `end_token`: an output that ends by itself lacks its end token, and the replica appends it.
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
    end_token: bool = False

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
    step_frames: bool = False
    """The model sends the outputs of all calls in step frames of the version that this release reads."""
    tries_handoffs: bool = False
    """The model only lists the tensors of a handoff. Whether handoffs work is tried with the first one."""


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
    step_frames.OUTPUT: "UINT8",
}
ENGINE_KEYS: Final = ("seeded_resume", "engine")
"""Parameters of the reference engine of release 0.1.0, whose output has its end token."""


def derive(
    metadata: Any,
    config: Any,
    *,
    role: str,
    model_version: str,
    block_tokens: int,
    configured: ConfiguredFacts = NOTHING,
    metrics: MetricsFound = NO_METRICS,
) -> ModelFacts:
    """Return the facts and capabilities of the model.

    `metadata`: Triton's ModelMetadataResponse. `config`: its ModelConfig. `model_version` and `block_tokens` are those of
    the mesh. A model without a version has that of the mesh. Raises ModelRefused with all features that `role` ("prefill"
    or "decode") lacks, and with all facts on which two sources differ.
    """
    inputs = {one.name: one.datatype for one in metadata.inputs}
    outputs = {one.name: one.datatype for one in metadata.outputs}
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    sources = FactSources(parameters, configured, metrics)
    missing = sources.missing
    _check_tensors(inputs, outputs, missing)
    if not config.model_transaction_policy.decoupled:
        missing.append("model_transaction_policy { decoupled: true }")
    if config.max_batch_size < 1:
        missing.append("max_batch_size of at least 1")
    capabilities = offered(inputs, outputs, parameters, is_disaggregated=configured.disaggregated != NO)
    facts = ModelFacts(
        capabilities=capabilities,
        tokens_per_block=sources.block_tokens(block_tokens),
        kv_blocks=sources.kv_blocks(),
        max_sequence_tokens=sources.max_sequence_tokens(),
        vocab_size=sources.vocab_size(),
        kv_address=parameters.get("kv_address", ""),
        model_version=parameters.get("model_version", model_version),
        load_report="load_report" in outputs,
        step_frames=offers_step_frames(outputs, parameters),
        stop="stop" in inputs,
        inputs=frozenset(inputs),
        outputs=frozenset(outputs),
        max_sequences=_optional_number(parameters, "max_batch_sequences"),
        digest=parameters.get("engine_digest", "")[:DIGEST_CHARACTERS_MAX],
        tries_handoffs=capabilities.disaggregated and not claims_handoffs(parameters),
    )
    if role == PREFILL and not capabilities.disaggregated:
        missing.append(_no_prefill(configured))
    if facts.model_version != model_version:
        missing.append(
            f'model_version "{model_version}", the version by engine.salt or [versions.NAME] '
            f'(it has "{facts.model_version}")'
        )
    if missing or sources.differing:
        lacks = f"; it lacks: {'; '.join(missing)}" if missing else ""
        differs = f"; its sources differ: {'; '.join(sources.differing)}" if sources.differing else ""
        raise ModelRefused(
            f"The model {metadata.name} cannot serve {role}{lacks}{differs}.",
            lacks_metrics=sources.lacks_metrics,
        )
    return facts


def tensor_faults(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[str]:
    """Return the tensors that kvmesh needs and the model lacks, and those of another type than kvmesh sends."""
    missing: list[str] = []
    _check_tensors(inputs, outputs, missing)
    return missing


def _no_prefill(configured: ConfiguredFacts) -> str:
    """Return what a prefill replica lacks."""
    if configured.disaggregated == NO:
        return 'engine.disaggregated = "auto" (it is "no", with which no prefill replica is needed)'
    return "input and output context_phase_params (disaggregated prefill), which prefill needs"


def _check_tensors(inputs: Mapping[str, str], outputs: Mapping[str, str], missing: list[str]) -> None:
    for what, names, tensors in (
        ("input", _REQUIRED_INPUTS, inputs),
        ("output", _REQUIRED_OUTPUTS, outputs),
    ):
        missing.extend(f"{what} {name}" for name in names if name not in tensors)
        for name, kind in tensors.items():
            if name in _TYPES and kind != _TYPES[name]:
                missing.append(f"{what} {name} of type {_TYPES[name]} (it is {kind})")


def _optional_number(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "")
    return int(text) if text.isdecimal() else 0


def _says(parameters: Mapping[str, str], name: str) -> bool:
    return parameters.get(name, "").lower() == "true"


def offers_step_frames(outputs: Mapping[str, str], parameters: Mapping[str, str]) -> bool:
    """Return whether the model sends step frames of the version that this release reads."""
    return step_frames.OUTPUT in outputs and parameters.get("step_frames") == str(step_frames.VERSION)


def claims_handoffs(parameters: Mapping[str, str]) -> bool:
    """Return whether the model says that its handoffs work. Release 0.1.0 says so with `release_handoff`.

    A stock model lists the tensors, although its handoffs work only inside one MPI world.
    """
    return _says(parameters, "disaggregated") or _says(parameters, "release_handoff")


def _has_end_token(parameters: Mapping[str, str]) -> bool:
    """Return whether the output contains its end token. TensorRT-LLM's C++ backend omits it."""
    told = parameters.get("end_token", "").lower()
    if told in ("true", "false"):
        return told == "true"
    return any(key in parameters for key in ENGINE_KEYS)


def _has_guides(inputs: Mapping[str, str], parameters: Mapping[str, str]) -> bool:
    """Return whether the model has guided output. A stock model lists the inputs also without a backend for it.

    Its parameter is then missing, empty, or the "${...}" of the template.
    """
    if not inputs.keys() >= {"guided_decoding_guide_type", "guided_decoding_guide"}:
        return False
    backend = parameters.get("guided_decoding_backend")
    is_stock = "gpt_model_type" in parameters
    return not is_stock if backend is None else bool(backend) and not backend.startswith("${")


def offered(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    parameters: Mapping[str, str],
    *,
    is_disaggregated: bool = True,
) -> Capabilities:
    """Return the capabilities of a model with these tensors (name -> Triton's data type) and parameters.

    `is_disaggregated`: False if the configuration forbids disaggregated serving.
    """
    says: Callable[[str], bool] = lambda name: _says(parameters, name)  # noqa: E731
    disaggregated = (
        is_disaggregated
        and "context_phase_params" in inputs
        and "context_phase_params" in outputs
        and parameters.get("disaggregated", "").lower() != "false"
    )
    has_guides = _has_guides(inputs, parameters)
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
        end_token=_has_end_token(parameters),
    )
