"""Translates a request into the values of TensorRT-LLM's objects. Pure: values in, keyword arguments out.

Field names and defaults: sampling_params.py@000a01de, request.py@08c33130, disaggregated_params.py@01009a33, and the
bindings of KvCacheRetentionConfig (docs/source/examples/llm_api_examples/kvcacheretentionconfig.md).
"""

from __future__ import annotations

from typing import Any, Final

from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import EngineRequest, RequestKind, Retention
from engines.tensorrt_llm.handoff import Handoff

NO_END: Final = -1
"""An `end_id` that no token has. None would need a tokenizer (llm.py@4c05a748, _prepare_sampling_params)."""


def sampling(request: EngineRequest) -> dict[str, Any]:
    """Return the arguments of SamplingParams, without `embedding_bias` and `guided_decoding`, which are objects.

    Greedy is `top_k` 1 alone: a temperature must be above 0. `end_id` and `stop_token_ids` end the output with the token
    itself. `min_tokens` holds back `end_id` alone, the smallest end token; TensorRT-LLM does not hold stop words back. One
    log-probability is the least that TensorRT-LLM returns; it includes that of the sampled token.
    """
    values: dict[str, Any] = {
        "max_tokens": 1 if request.kind is RequestKind.CONTEXT_ONLY else request.output_tokens_max,
        "end_id": min(request.end_ids, default=NO_END),
        "pad_id": max(0, min(request.end_ids, default=0)),
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    further = sorted(request.end_ids)[1:]
    if further:
        values["stop_token_ids"] = further
    drawn = request.sampling
    if drawn.is_greedy:
        values["top_k"] = 1
    else:
        values |= {"temperature": drawn.temperature, "seed": drawn.seed}
        # Without both cuts TensorRT-LLM would take the most likely token: `top_p` 1 keeps all.
        values["top_p"] = drawn.top_p if 0.0 < drawn.top_p < 1.0 else 1.0
        if drawn.top_k:
            values["top_k"] = drawn.top_k
    if drawn.log_probs or drawn.top_log_probs:
        values["logprobs"] = max(1, drawn.top_log_probs)
    changes = request.adjustments
    if changes.output_tokens_min:
        values["min_tokens"] = changes.output_tokens_min
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(changes, name):
            values[name] = getattr(changes, name)
    if changes.repetition_penalty != 1.0:
        values["repetition_penalty"] = changes.repetition_penalty
    return values


def guide(text: GuideText) -> dict[str, Any]:
    """Return the arguments of GuidedDecodingParams."""
    if text.kind is GuideKind.JSON:
        return {"json_object": True}
    names = {GuideKind.JSON_SCHEMA: "json", GuideKind.REGEX: "regex", GuideKind.EBNF_GRAMMAR: "grammar"}
    return {names[text.kind]: text.text}


def context_only() -> dict[str, Any]:
    """Return the arguments of DisaggregatedParams of a prefill."""
    return {"request_type": "context_only"}


def generation_only(handoff: Handoff) -> dict[str, Any]:
    """Return the arguments of DisaggregatedParams of a decode."""
    return {
        "request_type": "generation_only",
        "first_gen_tokens": list(handoff.first_tokens),
        "opaque_state": handoff.opaque_state,
        "ctx_request_id": handoff.ctx_request_id,
        "draft_tokens": handoff.draft_tokens,
        "disagg_request_id": handoff.disagg_request_id,
        "ctx_dp_rank": handoff.ctx_dp_rank,
        "ctx_info_endpoint": handoff.ctx_info_endpoint,
    }


def retention_ranges(retention: Retention) -> list[tuple[int, int | None, int, int | None]]:
    """Return the arguments of each TokenRangeRetentionConfig, its duration in milliseconds."""
    return [(each.start, each.end, each.priority, each.duration_ms) for each in retention.ranges]
