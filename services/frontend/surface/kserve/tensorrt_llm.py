"""The model `tensorrt_llm`: token ids in, token ids out. Pure.

Source: NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvmesh.errors import Violation, invalid
from services.frontend.surface.kserve.asked import Asked, Contract, Input
from services.frontend.surface.kserve.common_inputs import (
    OUTPUTS,
    by_name,
    finish_guide,
    flag,
    scalar,
    shared,
)
from services.frontend.surface.kserve.tensors import BOOL, FP32, INT32, Declared, refused
from services.frontend.surface.sampling_fields import BIASES_MAX

NAME: Final = "tensorrt_llm"
OUTPUT_IDS: Final = "output_ids"
SEQUENCE_LENGTH: Final = "sequence_length"
_IDS: Final = "input_ids"
_LENGTH: Final = "input_lengths"


def _keep(asked: Asked, name: str, values: Sequence[Any]) -> None:
    asked.given[name] = values


def _request_output_len(asked: Asked, _: str, values: Sequence[Any]) -> None:
    asked.request.limits.max_output_tokens = values[0]


def _stop_words(asked: Asked, name: str, values: Sequence[Any]) -> None:
    """Take words of one token each: row 0 has the ids of all words, row 1 where each word ends, then -1."""
    count = len(values) // 2
    ends = [each for each in values[count:] if each != -1]
    if ends != list(range(1, len(ends) + 1)) or any(each != -1 for each in values[count + len(ends) :]):
        raise refused(
            name, f"with words that end at {ends[:8]}", "words of one token, which end at 1, 2, 3 and so on,"
        )
    asked.request.sampling.stop_token_ids.extend(values[: len(ends)])


def _bad_words(_: Asked, name: str, values: Sequence[Any]) -> None:
    if any(each != -1 for each in values[len(values) // 2 :]):
        raise refused(name, "set", "no words: the mesh excludes none;")


def _embedding_bias(asked: Asked, name: str, values: Sequence[Any]) -> None:
    """Take a value for each token of the vocabulary; nearly all of them are 0."""
    biased = [index for index, value in enumerate(values) if value]
    if len(biased) > BIASES_MAX:
        raise refused(name, f"{len(biased)} values that are not 0", f"at most {BIASES_MAX}")
    for index in biased:
        asked.request.sampling.logit_bias[index] = values[index]


def _finish(asked: Asked) -> None:
    finish_guide(asked)
    if asked.stops:
        return
    ids = asked.given.get(_IDS)
    if ids is None:
        raise refused(_IDS, "missing", "the tokens of the prompt")
    (length,) = asked.given[_LENGTH]
    if not 0 <= length <= len(ids):
        raise refused(_LENGTH, str(length), f"0 to {len(ids)}, the size of {_IDS},")
    if length >= asked.tokens_max:
        raise invalid(
            "PROMPT_TOO_LONG", [Violation(_IDS, f"{length} tokens", f"1 to {asked.tokens_max - 1}")]
        )
    asked.request.tokens.ids.extend(ids[:length])


CONTRACT: Final = Contract(
    name=NAME,
    inputs=by_name(
        [
            Input(Declared(_IDS, INT32, (-1,)), _keep, "tokens.ids"),
            scalar(_LENGTH, INT32, _keep, is_required=True),
            scalar(
                "request_output_len", INT32, _request_output_len, "limits.max_output_tokens", is_required=True
            ),
            scalar("streaming", BOOL, flag("streams")),
            scalar("stop", BOOL, flag("stops")),
            Input(Declared("stop_words_list", INT32, (2, -1)), _stop_words, "sampling.stop_token_ids"),
            Input(Declared("bad_words_list", INT32, (2, -1)), _bad_words),
            Input(Declared("embedding_bias", FP32, (-1,)), _embedding_bias, "sampling.logit_bias"),
            *shared("runtime_top_k", "runtime_top_p", "len_penalty"),
        ]
    ),
    outputs=(Declared(OUTPUT_IDS, INT32, (-1, -1)), Declared(SEQUENCE_LENGTH, INT32, (-1,)), *OUTPUTS),
    always=frozenset({OUTPUT_IDS, SEQUENCE_LENGTH}),
    refuses=dict.fromkeys(
        (
            *(
                "runtime_top_p_decay",
                "runtime_top_p_min",
                "runtime_top_p_reset_ids",
                "beam_search_diversity_rate",
            ),
            *(
                "early_stopping",
                "no_repeat_ngram_size",
                "random_seed",
                "return_kv_cache_reuse_stats",
                "context_phase_params",
            ),
            *(
                "retention_token_range_starts",
                "retention_token_range_ends",
                "retention_token_range_priorities",
            ),
            *(
                "retention_token_range_durations_ms",
                "retention_decode_priority",
                "retention_decode_duration_ms",
            ),
            *("lora_task_id", "lora_weights", "lora_config", "draft_input_ids", "draft_logits"),
            *("draft_acceptance_threshold", "lookahead_window_size", "lookahead_ngram_size"),
            *("lookahead_verification_set_size", "decoder_input_ids", "decoder_input_lengths"),
            *(
                "encoder_input_features",
                "encoder_output_lengths",
                "prompt_embedding_table",
                "prompt_table_extra_ids",
            ),
            *("prompt_vocab_size", "mrope_rotary_cos_sin", "mrope_position_deltas", "cross_attention_mask"),
            *("skip_cross_attn_blocks", "multimodal_embedding", "multimodal_hashes", "multimodal_item_runs"),
        ),
        "the mesh does not offer it",
    ),
    finish=_finish,
)
