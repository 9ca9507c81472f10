"""disaggregated_params.py@01009a33: fields and check of DisaggregatedParams."""

from __future__ import annotations

from dataclasses import dataclass

from .surface import Recorded

_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(kw_only=True)
class DisaggregatedParams(Recorded):
    """Keyword arguments only, as in the real class."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[object] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None and self.request_type not in _TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}")
