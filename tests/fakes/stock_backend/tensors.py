"""Inputs, outputs and parameters of the stock model, by its config.pbtxt. Pure.

Source: NVIDIA/TensorRT-LLM at 0c8de69a, triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from engines.contract.tensors import MODEL_NAME

NEEDED: Final = ("input_lengths", "request_output_len")
"""Inputs that each request must have."""

RAGGED: Final = "ragged"
"""Inputs with `allow_ragged_batch`."""
RESHAPED: Final = "reshaped"
"""Scalars with an empty `reshape`."""
PLAIN: Final = "plain"


class Tensor(NamedTuple):
    """One tensor. `dims` have no batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    form: str = PLAIN


def _scalars(data_type: str, names: str, form: str = RESHAPED) -> Iterator[Tensor]:
    return (Tensor(name, data_type, (1,), form) for name in names.split())


INPUTS: Final = (
    Tensor("input_ids", "INT32", (-1,), RAGGED),
    Tensor("encoder_input_features", "FP16", (-1, -1), RAGGED),
    *_scalars("INT32", "encoder_output_lengths input_lengths request_output_len num_return_sequences"),
    Tensor("draft_input_ids", "INT32", (-1,), RAGGED),
    Tensor("decoder_input_ids", "INT32", (-1,), RAGGED),
    *_scalars("INT32", "decoder_input_lengths"),
    Tensor("draft_logits", "FP32", (-1, -1), RAGGED),
    *_scalars("FP32", "draft_acceptance_threshold"),
    *_scalars("INT32", "end_id pad_id"),
    Tensor("stop_words_list", "INT32", (2, -1), RAGGED),
    Tensor("bad_words_list", "INT32", (2, -1), RAGGED),
    Tensor("embedding_bias", "FP32", (-1,), RAGGED),
    *_scalars("INT32", "beam_width"),
    *_scalars("FP32", "temperature"),
    *_scalars("INT32", "runtime_top_k"),
    *_scalars("FP32", "runtime_top_p runtime_top_p_min runtime_top_p_decay"),
    *_scalars("INT32", "runtime_top_p_reset_ids"),
    *_scalars("FP32", "len_penalty"),
    *_scalars("BOOL", "early_stopping"),
    *_scalars("FP32", "repetition_penalty"),
    *_scalars("INT32", "min_tokens"),
    *_scalars("FP32", "beam_search_diversity_rate presence_penalty frequency_penalty"),
    *_scalars("UINT64", "seed"),
    *_scalars("BOOL", "return_log_probs return_context_logits return_generation_logits return_perf_metrics"),
    *_scalars(
        "BOOL", "return_num_input_tokens return_num_output_tokens exclude_input_in_output stop streaming"
    ),
    Tensor("prompt_embedding_table", "FP16", (-1, -1), RAGGED),
    Tensor("prompt_table_extra_ids", "UINT64", (-1,), RAGGED),
    *_scalars("INT32", "prompt_vocab_size"),
    Tensor("cross_attention_mask", "BOOL", (-1, -1), RAGGED),
    Tensor("mrope_rotary_cos_sin", "FP32", (-1,)),
    Tensor("mrope_position_deltas", "INT64", (1,)),
    *_scalars("UINT64", "lora_task_id"),
    Tensor("lora_weights", "FP16", (-1, -1), RAGGED),
    Tensor("lora_config", "INT32", (-1, 3), RAGGED),
    Tensor("context_phase_params", "UINT8", (-1,), RAGGED),
    *_scalars("BOOL", "skip_cross_attn_blocks", RAGGED),
    Tensor("retention_token_range_starts", "INT32", (-1,), RAGGED),
    Tensor("retention_token_range_ends", "INT32", (-1,), RAGGED),
    Tensor("retention_token_range_priorities", "INT32", (-1,), RAGGED),
    Tensor("retention_token_range_durations_ms", "INT32", (-1,), RAGGED),
    *_scalars("INT32", "retention_decode_priority retention_decode_duration_ms", RAGGED),
    *_scalars("STRING", "guided_decoding_guide_type guided_decoding_guide", RAGGED),
    *_scalars("INT32", "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size", RAGGED),
)

OUTPUTS: Final = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    *_scalars("INT32", "batch_index sequence_index", PLAIN),
    Tensor("context_phase_params", "UINT8", (-1,)),
    *_scalars("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks", PLAIN),
    *_scalars(
        "INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns", PLAIN
    ),
    *_scalars("FP32", "acceptance_rate", PLAIN),
    *_scalars(
        "INT32", "total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens", PLAIN
    ),
)

UNSET: Final = (
    "encoder_model_path",
    "max_attention_window_size",
    "sink_token_length",
    "cross_kv_cache_fraction",
    "kv_cache_onboard_blocks",
    "enable_trt_overlap",
    "request_stats_max_iterations",
    "normalize_log_probs",
    "gpu_device_ids",
    "participant_ids",
    "num_nodes",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
    "decoding_mode",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "medusa_choices",
    "eagle_choices",
    "gpu_weights_percent",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "cuda_graph_cache_size",
    "speculative_decoding_fast_logits",
    "tokenizer_dir",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
)
"""Parameters that an operator mostly leaves as the template has them: "${name}"."""


def parameters(cancellation_check_ms: int) -> dict[str, str]:
    """Return the parameters of a filled template."""
    given = {
        "max_beam_width": "1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "/engines/llama",
        "max_tokens_in_paged_kv_cache": "",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "kv_cache_host_memory_bytes": "0",
        "exclude_input_in_output": "true",
        "cancellation_check_period_ms": str(cancellation_check_ms),
        "stats_check_period_ms": "100",
        "iter_stats_max_iterations": "1000",
        "enable_kv_cache_reuse": "true",
        "enable_chunked_context": "true",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    }
    return given | {name: f"${{{name}}}" for name in UNSET}


def config_pbtxt(given: Mapping[str, str], queue_max: int, *, batch_max: int = 64) -> str:
    """Return config.pbtxt with the parameters `given`. The backend is Python, that of the impersonation."""
    lines = [
        f'name: "{MODEL_NAME}"',
        'backend: "python"',
        f"max_batch_size: {batch_max}",
        "model_transaction_policy { decoupled: true }",
        f"dynamic_batching {{ default_queue_policy: {{ max_queue_size: {queue_max} }} }}",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    for one in INPUTS:
        more = {RAGGED: " allow_ragged_batch: true", RESHAPED: " reshape { shape: [ ] }"}.get(one.form, "")
        optional = "" if one.name in NEEDED else " optional: true"
        lines.append(f"input {{ {_shape(one)}{more}{optional} }}")
    lines += [f"output {{ {_shape(one)} }}" for one in OUTPUTS]
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()
    ]
    return "\n".join(lines) + "\n"


def _shape(one: Tensor) -> str:
    return f'name: "{one.name}" data_type: TYPE_{one.data_type} dims: {list(one.dims)}'
