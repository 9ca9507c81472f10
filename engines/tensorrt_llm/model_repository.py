"""The files of the model repository: config.pbtxt with what the mesh must know, and the warm-up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from engines.contract import model_repository
from engines.contract.step_frames import VERSION
from engines.contract.tensors import GUIDE_INPUTS, INPUTS, LORA_INPUTS, OUTPUTS, RETENTION_INPUTS
from engines.tensorrt_llm.settings import QUEUE_MAX, Settings

WARM_UP_RUNS: Final = 2
"""The first run of a shape builds kernels, the second one shows that it is warm."""
WARM_UP_OUTPUT: Final = 8
WARM_UP_PROMPT_MAX: Final = 256
_PREFIX = "warmup/"


def config_pbtxt(settings: Settings, more: Mapping[str, object] | None = None) -> str:
    """Return the model's config.pbtxt. `more`: further parameters, those that a launcher knows."""
    handoff = "context_phase_params"
    inputs = [*INPUTS, *RETENTION_INPUTS]
    inputs += GUIDE_INPUTS if settings.has_guides else ()
    inputs += LORA_INPUTS if settings.loras else ()
    outputs = list(OUTPUTS)
    if not settings.is_disaggregated:
        inputs = [each for each in inputs if each.name != handoff]
        outputs = [each for each in outputs if each.name != handoff]
    if not settings.has_events:
        outputs = [each for each in outputs if each.name != "kv_events"]
    parameters: dict[str, object] = {
        "tokens_per_block": settings.tokens_per_block,
        "kv_blocks": settings.kv_blocks,
        "max_sequence_tokens": settings.max_sequence_tokens,
        "vocab_size": settings.vocab_size,
        "max_batch_tokens": settings.max_num_tokens,
        "max_batch_sequences": settings.max_batch_size,
        "max_queue_size": QUEUE_MAX,
        "model_version": settings.model_version,
        "engine_digest": settings.digest,
        "engine_kind": "tensorrt_llm",
        "end_token": "true",  # the PyTorch backend outputs it
        "disaggregated": "true" if settings.is_disaggregated else "false",
        "step_frames": VERSION,
        "release_handoff": "false",  # see engine.TensorRtLlmEngine.release_handoff
        "seeded_resume": "false",  # draws depend on the request's history in its engine, logits on the batch
        **(more or {}),
    }
    warm_up = _warm_up(settings) if settings.warm_up else ""
    return model_repository.config_pbtxt(inputs, outputs, parameters, warm_up)


def warm_up_files(settings: Settings) -> dict[str, bytes]:
    """Return the tensors of the warm-up by their path in the model's folder. Triton reads them from `warmup/`."""
    if not settings.warm_up:
        return {}
    prompt, output = _warm_up_lengths(settings)
    return {
        f"{_PREFIX}input_lengths": np.int32(prompt).tobytes(),
        f"{_PREFIX}request_output_len": np.int32(output).tobytes(),
        f"{_PREFIX}streaming": b"\x01",
    }


def _warm_up_lengths(settings: Settings) -> tuple[int, int]:
    longest = min(settings.max_sequence_tokens, settings.kv_blocks * settings.tokens_per_block)
    output = min(WARM_UP_OUTPUT, longest // 2)
    return min(WARM_UP_PROMPT_MAX, longest - output), output


def _warm_up(settings: Settings) -> str:
    """Return `model_warmup` of Triton's model configuration: a prompt of zeros, streamed, WARM_UP_RUNS times.

    Tried with tritonserver 2.51: a decoupled Python model runs it after `initialize`, and the model is ready after its end.
    """
    prompt, _ = _warm_up_lengths(settings)
    inputs = [
        _input("input_ids", "TYPE_INT32", prompt, "zero_data: true"),
        _input("input_lengths", "TYPE_INT32", 1, 'input_data_file: "input_lengths"'),
        _input("request_output_len", "TYPE_INT32", 1, 'input_data_file: "request_output_len"'),
        _input("streaming", "TYPE_BOOL", 1, 'input_data_file: "streaming"'),
    ]
    return f'model_warmup {{ name: "prompt" batch_size: 1 count: {WARM_UP_RUNS} {" ".join(inputs)} }}'


def _input(name: str, data_type: str, size: int, data: str) -> str:
    return f'inputs {{ key: "{name}" value {{ data_type: {data_type} dims: [ {size} ] {data} }} }}'
