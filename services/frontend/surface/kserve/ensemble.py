"""The model `ensemble`: text in, text out. Pure.

Source: NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.frontend.surface.kserve.asked import Asked, Contract, Input
from services.frontend.surface.kserve.common_inputs import (
    OUTPUTS,
    by_name,
    finish_guide,
    flag,
    no_words,
    scalar,
    shared,
)
from services.frontend.surface.kserve.tensors import BOOL, BYTES, INT32, Declared, texts

NAME: Final = "ensemble"
TEXT_OUTPUT: Final = "text_output"


def _text(asked: Asked, name: str, values: Sequence[Any]) -> None:
    (asked.request.text,) = texts(name, values)


def _max_tokens(asked: Asked, _: str, values: Sequence[Any]) -> None:
    asked.request.limits.max_output_tokens = values[0]


def _stop_words(asked: Asked, name: str, values: Sequence[Any]) -> None:
    # Clients of TensorRT-LLM send an empty word for none.
    asked.request.sampling.stop.extend(each for each in texts(name, values) if each)


CONTRACT: Final = Contract(
    name=NAME,
    inputs=by_name(
        [
            scalar("text_input", BYTES, _text, "text", is_required=True),
            scalar("max_tokens", INT32, _max_tokens, "limits.max_output_tokens", is_required=True),
            scalar("stream", BOOL, flag("streams")),
            Input(Declared("stop_words", BYTES, (-1,)), _stop_words, "sampling.stop"),
            Input(Declared("bad_words", BYTES, (-1,)), no_words("the mesh excludes no words")),
            *shared("top_k", "top_p", "length_penalty"),
        ]
    ),
    outputs=(Declared(TEXT_OUTPUT, BYTES, (-1,)), *OUTPUTS),
    always=frozenset({TEXT_OUTPUT}),
    refuses=dict.fromkeys(
        (
            *(
                "decoder_text_input",
                "image_input",
                "image_bytes_input",
                "image_url_input",
                "video_bytes_input",
            ),
            *(
                "embedding_bias_words",
                "embedding_bias_weights",
                "lora_task_id",
                "lora_weights",
                "lora_config",
            ),
            *("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids", "num_draft_tokens"),
            *("use_draft_logits", "early_stopping", "random_seed", "return_kv_cache_reuse_stats"),
        ),
        "the mesh does not offer it",
    ),
    finish=finish_guide,
)
