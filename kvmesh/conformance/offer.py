"""Capabilities and facts that a Triton model offers, from its metadata and configuration. Pure.

Unlike `capabilities.derive` nothing is refused: a size that the model does not tell is 0, and may be given by the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvmesh.triton import capabilities
from kvmesh.triton.capabilities import Capabilities

SIZES: Final = ("vocab_size", "tokens_per_block", "kv_blocks", "max_sequence_tokens")
"""Parameters of a model that kvmesh needs as numbers above 0."""


class Disagreement(Exception):
    """Two sources tell different sizes. The text is one sentence with both values."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tensors, capabilities and sizes of one model. Sizes are in tokens and blocks; 0: unknown."""

    model: str
    inputs: Mapping[str, str]
    """Name -> Triton's data type."""
    outputs: Mapping[str, str]
    parameters: Mapping[str, str]
    is_decoupled: bool
    max_batch_size: int
    capabilities: Capabilities
    vocab_size: int = 0
    tokens_per_block: int = 0
    kv_blocks: int = 0
    max_sequence_tokens: int = 0
    max_sequences: int = 0
    """Requests that the engine runs at once."""

    @property
    def kv_address(self) -> str:
        """Address from which the engine's KV blocks can be pulled; empty: unknown."""
        return self.parameters.get("kv_address", "")

    @property
    def claims_handoffs(self) -> bool:
        """True if the model says that its handoffs work. Else replicas try the first one."""
        return capabilities.claims_handoffs(self.parameters)

    def with_measured(self, kv_blocks: int, tokens_per_block: int) -> Offer:
        """Return the offer with sizes from metrics; 0: not told. Raises Disagreement if they differ from known ones."""
        for name, value in (("kv_blocks", kv_blocks), ("tokens_per_block", tokens_per_block)):
            known = getattr(self, name)
            if value and known and value != known:
                raise Disagreement(
                    f"{name} is {value} by the metrics, but {known} by the model or the options."
                )
        return replace(
            self,
            kv_blocks=kv_blocks or self.kv_blocks,
            tokens_per_block=tokens_per_block or self.tokens_per_block,
        )

    @property
    def untold(self) -> list[str]:
        """The sizes that the model itself does not tell."""
        return [name for name in SIZES if not _number(self.parameters, name)]


def offer_of(metadata: Any, config: Any, given: Mapping[str, int] | None = None) -> Offer:
    """Return what the model offers.

    `metadata`: Triton's ModelMetadataResponse. `config`: its ModelConfig. `given`: sizes by the names of SIZES, from the
    operator; 0: unknown. Raises Disagreement if a given size differs from the model's own.
    """
    inputs = {one.name: one.datatype for one in metadata.inputs}
    outputs = {one.name: one.datatype for one in metadata.outputs}
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    sizes = {name: _merged(parameters, name, (given or {}).get(name, 0)) for name in SIZES}
    return Offer(
        model=metadata.name,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        is_decoupled=config.model_transaction_policy.decoupled,
        max_batch_size=config.max_batch_size,
        capabilities=capabilities.offered(inputs, outputs, parameters),
        max_sequences=_number(parameters, "max_batch_sequences"),
        **sizes,
    )


def _merged(parameters: Mapping[str, str], name: str, given: int) -> int:
    told = _number(parameters, name)
    if told and given and told != given:
        raise Disagreement(f"{name} is {told} by the model's parameters, but {given} by the options.")
    return told or given


def _number(parameters: Mapping[str, str], name: str) -> int:
    text = parameters.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else 0
