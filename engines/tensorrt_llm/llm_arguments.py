"""Names of the arguments of TensorRT-LLM's `LLM(...)`, so that a mistake in llm.yaml is found without TensorRT-LLM. Pure.

Read in tensorrt_llm/llmapi/llm_args.py (file 7019226376 of the source index, between 1.2 and 1.3). `LLM` itself refuses
unknown names with ValueError "LLM got invalid argument: NAME" (llm.py@4c05a748). Nested objects forbid unknown names, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARGUMENTS: Final = _names(
    """
    model tokenizer tokenizer_mode custom_tokenizer skip_tokenizer_init trust_remote_code tensor_parallel_size dtype
    revision tokenizer_revision model_kwargs pipeline_parallel_size context_parallel_size gpus_per_node
    moe_cluster_parallel_size moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp
    enable_lm_head_tp_in_adp pp_partition cp_config load_format enable_lora lora_config kv_cache_config
    enable_chunked_prefill guided_decoding_backend batched_logits_processor iter_stats_max_iterations
    request_stats_max_iterations peft_cache_config scheduler_config cache_transceiver_config sparse_attention_config
    speculative_config max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens gather_generation_logits
    num_postprocess_workers postprocess_tokenizer_dir reasoning_parser otlp_traces_endpoint backend return_perf_metrics
    perf_metrics_max_requests orchestrator_type env_overrides garbage_collection_gen0_threshold cuda_graph_config
    attention_dp_config disable_overlap_scheduler moe_config nvfp4_gemm_config attn_backend sampler_type
    sampler_force_async_worker enable_iter_perf_stats enable_iter_req_stats print_iter_log batch_wait_timeout_ms
    batch_wait_timeout_iters batch_wait_max_tokens_ratio torch_compile_config enable_autotuner
    enable_layerwise_nvtx_marker enable_min_latency stream_interval force_dynamic_quantization allreduce_strategy
    checkpoint_loader checkpoint_format kv_connector_config mm_encoder_only ray_worker_extension_cls
    ray_placement_config enable_sleep use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm
    disable_flashinfer_sampling max_stats_len layer_wise_benchmarks_config
    """
)
"""Arguments of the PyTorch backend: the fields of BaseLlmArgs and TorchLlmArgs."""

NESTED: Final[Mapping[str, frozenset[str]]] = {
    "kv_cache_config": _names(
        """
        enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size
        onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size
        attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse use_uvm max_gpu_total_bytes dtype
        mamba_ssm_cache_dtype tokens_per_block use_kv_cache_manager_v2 max_util_for_resume
        """
    ),
    "cache_transceiver_config": _names(
        """
        backend transceiver_runtime max_tokens_in_buffer kv_transfer_timeout_ms kv_transfer_sender_future_timeout_ms
        """
    ),
}
"""Fields of the nested objects that this package reads: KvCacheConfig and CacheTransceiverConfig."""


def unknown(given: Mapping[str, Any]) -> list[str]:
    """Return one phrase for each name that `LLM(...)` does not take, with the name that was meant, if one is near."""
    found = [_phrase(name, ARGUMENTS) for name in _texts(given) if name not in ARGUMENTS]
    for outer, names in NESTED.items():
        inner = given.get(outer)
        if isinstance(inner, Mapping):
            found += [_phrase(name, names, outer) for name in _texts(inner) if name not in names]
    return found


def _texts(given: Mapping[str, Any]) -> Iterable[str]:
    return [str(name) for name in given]


def _phrase(name: str, known: frozenset[str], outer: str = "") -> str:
    prefix = f"{outer}." if outer else ""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"{prefix}{name}" + (f" (did you mean {prefix}{near[0]}?)" if near else "")
