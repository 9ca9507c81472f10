"""sampling_params.py@000a01de: fields, defaults and checks of SamplingParams and GuidedDecodingParams."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .surface import Recorded


@dataclass(kw_only=True)
class GuidedDecodingParams(Recorded):
    """At most one guide."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        if sum(bool(getattr(self, each.name)) for each in fields(self)) > 1:
            raise ValueError("Only one guide can be used for a request")


@dataclass(kw_only=True)
class SamplingParams(Recorded):
    """The fields that the engine sets; the real class has more."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        # Executor's SamplingConfig (cpp/tensorrt_llm/executor/samplingConfig.cpp): a temperature is above 0.
        if self.temperature is not None and self.temperature <= 0.0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")

    @property
    def _greedy_decoding(self) -> bool:
        return self.top_k in (None, 1) and self.top_p in (None, 0.0)
