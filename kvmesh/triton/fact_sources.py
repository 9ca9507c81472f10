"""Facts of an engine from several sources: the model's parameters, the configuration, Triton's /metrics. Pure.

A stock model of TensorRT-LLM has none of the parameters. Sources that differ are a mistake of the operator: the caches and
limits of the mesh would not be those of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvmesh.triton.server_metrics import ServerMetrics

AUTO, NO = "auto", "no"
"""Values of engine.disaggregated."""


@dataclass(frozen=True, slots=True)
class ConfiguredFacts:
    """Facts that the configuration file gives. None: it does not."""

    block_tokens: int | None = None
    kv_blocks: int | None = None
    kv_blocks_key: str = "engine.kv_blocks"
    """The key that gives `kv_blocks`, and the one to set if none does."""
    max_sequence_tokens: int | None = None
    """A limit of the mesh: the smaller one of this and of the engine's own is taken."""
    vocab_size: int | None = None
    disaggregated: str = AUTO
    """AUTO, or NO: every prompt runs on decode alone."""


NOTHING: Final = ConfiguredFacts()


@dataclass(frozen=True, slots=True)
class MetricsFound:
    """The answer of Triton's /metrics. `metrics` None: there is no page, for `reason`."""

    address: str = ""
    """Empty: the replica does not know the address."""
    metrics: ServerMetrics | None = None
    reason: str = ""

    def lacking(self) -> str:
        """Return why a fact is not among the metrics, as the end of a sentence."""
        if not self.address:
            return "neither --engine-metrics nor engine.metrics_port is set"
        if self.metrics is None:
            return f"http://{self.address}/metrics cannot be read ({self.reason})"
        return f"http://{self.address}/metrics does not tell it"


NO_METRICS: Final = MetricsFound()


@dataclass(slots=True)
class FactSources:
    """Takes the facts one by one. `missing` and `differing` collect parts of the refusal."""

    parameters: Mapping[str, str]
    configured: ConfiguredFacts = NOTHING
    found: MetricsFound = NO_METRICS
    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    lacks_metrics: bool = False
    """True if a fact is missing that TensorRT-LLM tells after its first iteration."""

    def block_tokens(self, of_mesh: int) -> int:
        """Return the tokens of a KV block. They must be those of the mesh."""
        metrics = self.found.metrics
        told = self._told("tokens_per_block", None, "", metrics.block_tokens if metrics else 0)
        if told and told != of_mesh:
            self.missing.append(
                f"tokens_per_block {of_mesh}, the engine.block_tokens of the mesh (it has {told})"
            )
        if told or self._is_bad("tokens_per_block"):
            return told
        return self._or_missing(
            "tokens_per_block", self.configured.block_tokens, "engine.block_tokens", in_metrics=True
        )

    def kv_blocks(self) -> int:
        """Return the blocks of the KV cache."""
        metrics, configured = self.found.metrics, self.configured
        key = configured.kv_blocks_key
        told = self._told("kv_blocks", configured.kv_blocks, key, metrics.blocks_total if metrics else 0)
        if told or self._is_bad("kv_blocks"):
            return told
        return self._or_missing("kv_blocks", None, key, in_metrics=True)

    def max_sequence_tokens(self) -> int:
        """Return the longest prompt plus output."""
        told = self._number("max_sequence_tokens")
        limit = self.configured.max_sequence_tokens
        if told:
            return min(told, limit or told)
        if self._is_bad("max_sequence_tokens"):
            return 0
        return self._or_missing("max_sequence_tokens", limit, "engine.max_sequence_tokens")

    def vocab_size(self) -> int:
        """Return the number of token ids."""
        key = "engine.vocab_size"
        told = self._told("vocab_size", self.configured.vocab_size, key, 0)
        return told if told or self._is_bad("vocab_size") else self._or_missing("vocab_size", None, key)

    def _told(self, name: str, configured: int | None, key: str, measured: int) -> int:
        """Return the value of the first source that tells the fact. 0: none does. Note sources that differ."""
        values = {
            f"by the model's parameter {name}": self._number(name),
            f"by {key}": configured or 0,
            f"by http://{self.found.address}/metrics": measured,
        }
        told = {source: value for source, value in values.items() if value}
        if len(set(told.values())) > 1:
            shown = [f"{value} {source}" for source, value in told.items()]
            self.differing.append(f"{name} is {', '.join(shown[:-1])} and {shown[-1]}")
        return next(iter(told.values()), 0)

    def _number(self, name: str) -> int:
        text = self.parameters.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
        return 0

    def _is_bad(self, name: str) -> bool:
        """Note a parameter that is no number. Return True if there is one."""
        text = self.parameters.get(name, "")
        if text and not self._number(name):
            self.missing.append(f'parameter {name} as a whole number above 0 (it is "{text}")')
            return True
        return False

    def _or_missing(self, name: str, given: int | None, key: str, *, in_metrics: bool = False) -> int:
        if given:
            return given
        why = "the model has no such parameter"
        if in_metrics:
            self.lacks_metrics = True
            why = f"{why}, and {self.found.lacking()}"
        self.missing.append(f"{name} ({why}; set {key})")
        return 0
