"""The tensor contract: names, types and dims of the inputs and outputs of TensorRT-LLM's `tensorrt_llm` model.

Dims omit the leading batch dimension, which is always 1 on the wire. Extensions of this engine are the input
`return_top_log_probs` and the last five outputs.
"""

from dataclasses import dataclass
from typing import Final

MODEL_NAME: Final = "tensorrt_llm"
STEP_FRAME: Final = "step_frame"
"""Output of a model with step frames; its parameter `step_frames` tells their version."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor."""

    name: str
    data_type: str
    dims: tuple[int, ...]


INPUTS: Final = (
    Input("input_ids", "TYPE_INT32", (-1,)),
    Input("input_lengths", "TYPE_INT32", is_optional=False),
    Input("request_output_len", "TYPE_INT32", is_optional=False),
    Input("streaming", "TYPE_BOOL"),
    Input("stop", "TYPE_BOOL"),
    Input("end_id", "TYPE_INT32"),
    Input("pad_id", "TYPE_INT32"),
    Input("temperature", "TYPE_FP32"),
    Input("runtime_top_p", "TYPE_FP32"),
    Input("runtime_top_k", "TYPE_INT32"),
    Input("seed", "TYPE_UINT64"),
    Input("return_log_probs", "TYPE_BOOL"),
    Input("return_perf_metrics", "TYPE_BOOL"),
    Input("context_phase_params", "TYPE_UINT8", (-1,)),
    Input("frequency_penalty", "TYPE_FP32"),
    Input("presence_penalty", "TYPE_FP32"),
    Input("repetition_penalty", "TYPE_FP32"),
    Input("min_tokens", "TYPE_INT32"),
    Input("embedding_bias", "TYPE_FP32", (-1,)),
    Input("stop_words_list", "TYPE_INT32", (2, -1)),
    Input("return_top_log_probs", "TYPE_INT32"),
)

GUIDE_INPUTS: Final = (
    Input("guided_decoding_guide_type", "TYPE_STRING"),
    Input("guided_decoding_guide", "TYPE_STRING"),
)
"""Further inputs of a model with a tokenizer."""

LORA_INPUTS: Final = (Input("lora_task_id", "TYPE_UINT64"),)
"""Further input of a model with LoRA adapters. The weights are the engine's own: no tensor carries them."""

RETENTION_INPUTS: Final = (
    Input("retention_token_range_starts", "TYPE_INT32", (-1,)),
    Input("retention_token_range_ends", "TYPE_INT32", (-1,)),
    Input("retention_token_range_priorities", "TYPE_INT32", (-1,)),
    Input("retention_token_range_durations_ms", "TYPE_INT32", (-1,)),
    Input("retention_decode_priority", "TYPE_INT32"),
    Input("retention_decode_duration_ms", "TYPE_INT32"),
)
"""Further inputs of an engine that keeps KV cache blocks by priority."""

OUTPUTS: Final = (
    Output("output_ids", "TYPE_INT32", (-1, -1)),
    Output("sequence_length", "TYPE_INT32", (-1,)),
    Output("context_phase_params", "TYPE_UINT8", (-1,)),
    Output("output_log_probs", "TYPE_FP32", (-1, -1)),
    Output("cum_log_probs", "TYPE_FP32", (-1,)),
    Output("kv_cache_alloc_new_blocks", "TYPE_INT32", (1,)),
    Output("kv_cache_reused_blocks", "TYPE_INT32", (1,)),
    Output("kv_cache_alloc_total_blocks", "TYPE_INT32", (1,)),
    Output("arrival_time_ns", "TYPE_INT64", (1,)),
    Output("first_scheduled_time_ns", "TYPE_INT64", (1,)),
    Output("first_token_time_ns", "TYPE_INT64", (1,)),
    Output("last_token_time_ns", "TYPE_INT64", (1,)),
    Output("top_log_prob_ids", "TYPE_INT32", (-1, -1)),
    Output("top_log_probs", "TYPE_FP32", (-1, -1)),
    Output("kv_events", "TYPE_UINT8", (-1,)),
    Output("load_report", "TYPE_UINT8", (-1,)),
    Output(STEP_FRAME, "TYPE_UINT8", (-1,)),
)
