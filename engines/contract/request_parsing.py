"""Parses and validates the tensors and parameters of one Triton request. Pure: arrays in, values out."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.contract import errors
from engines.contract.errors import EngineError
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import (
    Adjustments,
    ControlRequest,
    EngineRequest,
    EventCursor,
    RequestKind,
    RequestLimits,
    ResponseOptions,
    Retention,
    RetentionRange,
    SamplingParams,
    StepSlot,
)

TensorLookup = Callable[[str], npt.NDArray[Any] | None]
"""Returns an input tensor by name, shape [1, ...], or None if the request has no tensor of that name."""


PENALTY_MAX = 2.0
"""Largest frequency and presence penalty, and the smallest without its sign."""
REPETITION_MIN, REPETITION_MAX = 0.01, 10.0
TOP_LOG_PROBS_MAX = 20
SLOT_MAX = 2**32 - 1
STREAM_NAME_MAX = 64
"""Most characters of the name of a step stream."""
PRIORITY_MAX, PRIORITY_DEFAULT = 100, 35
"""Retention priorities of TensorRT-LLM: 0 to 100, 35 for blocks without one."""


def parse_event_cursor(parameters: str) -> EventCursor | None:
    """Return the cursor of a resumed subscription, from the request parameter `after`; None: start with a snapshot."""
    text = str(json.loads(parameters or "{}").get("after", ""))
    if not text:
        return None
    boot_id, _, number = text.rpartition(":")
    if not boot_id or not (number.isascii() and number.isdigit()):
        raise _bad_value("after", text, "<boot_id>:<event_id>")
    return EventCursor(boot_id, int(number))


def parse_max_bytes(parameters: str) -> int | None:
    """Return the bytes after which a subscription ends, from the request parameter `max_bytes`; None: no limit."""
    text = str(json.loads(parameters or "{}").get("max_bytes", ""))
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise _bad_value("max_bytes", text, ">= 1")
    return int(text)


def parse_step_stream(parameters: str) -> str:
    """Return the name of a step stream, from the request parameter `step_stream`."""
    name = str(json.loads(parameters or "{}").get("step_stream", ""))
    if not 1 <= len(name) <= STREAM_NAME_MAX:
        raise _bad_value("step_stream", name[:STREAM_NAME_MAX], f"1..{STREAM_NAME_MAX} characters")
    return name


def parse_step_slot(parameters: str) -> StepSlot | None:
    """Return where the outputs of a request go, from the request parameters `step_stream` and `step_slot`.

    None: to the request's own responses.
    """
    found = json.loads(parameters or "{}")
    if "step_slot" not in found:
        return None
    return StepSlot(parse_step_stream(parameters), _slot("step_slot", str(found["step_slot"])))


def parse_step_slots(parameters: str) -> list[int]:
    """Return the slots to cancel, from the request parameter `step_slots`: numbers with commas."""
    text = str(json.loads(parameters or "{}").get("step_slots", ""))
    return [_slot("step_slots", one) for one in text.split(",")]


def _slot(field: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(SLOT_MAX)) and int(text) <= SLOT_MAX):
        raise _bad_value(field, text[:20], f"0..{SLOT_MAX}")
    return int(text)


def parse_request_kind(parameters: str, tensor: TensorLookup) -> RequestKind | ControlRequest:
    """Return the kind of a request; raises EngineError for an unknown request_type (TensorRT-LLM would generate)."""
    if _flag(tensor, "stop"):
        return ControlRequest.STOP
    name = json.loads(parameters or "{}").get("request_type", RequestKind.CONTEXT_AND_GENERATION.value)
    for values in (RequestKind, ControlRequest):
        for one in values:
            if one.value == name and one is not ControlRequest.STOP:
                return one
    allowed = ", ".join(
        one.value for one in [*RequestKind, *ControlRequest] if one is not ControlRequest.STOP
    )
    raise EngineError(errors.BAD_VALUE.format(field="request_type", value=name, allowed=allowed))


def parse_response_options(tensor: TensorLookup) -> ResponseOptions:
    """Return the response options of a request."""
    return ResponseOptions(
        _flag(tensor, "streaming"), _flag(tensor, "return_perf_metrics"), _flag(tensor, "return_log_probs")
    )


def parse_request(
    kind: RequestKind,
    key: int,
    request_id: str,
    parameters: str,
    tensor: TensorLookup,
    limits: RequestLimits,
    arrival_ns: int,
) -> EngineRequest:
    """Validate a request that generates tokens; raises EngineError with the field, its value and the allowed range."""
    prompt = _prompt(tensor, limits)
    output_tokens_max = int(_scalar(tensor, "request_output_len", is_required=True))
    if output_tokens_max < 1:
        raise _bad_value("request_output_len", output_tokens_max, ">= 1")
    if len(prompt) + output_tokens_max > limits.max_sequence_tokens:
        raise EngineError(
            errors.PROMPT_TOO_LONG.format(
                prompt=len(prompt), output=output_tokens_max, limit=limits.max_sequence_tokens
            )
        )
    kv_peer = json.loads(parameters or "{}").get("kv_peer")
    return EngineRequest(
        key=key,
        request_id=request_id,
        kind=kind,
        prompt=prompt,
        output_tokens_max=output_tokens_max,
        end_ids=_end_ids(tensor),
        output_start=_output_start(parameters, len(prompt)),
        adjustments=_adjustments(tensor, limits),
        guide=_guide(tensor, limits),
        sampling=_sampling(tensor, limits),
        context_phase_params=parse_handoff(tensor) if kind is RequestKind.GENERATION_ONLY else b"",
        kv_peer=None if kv_peer is None else str(kv_peer),
        arrival_ns=arrival_ns,
        lora_id=_lora_id(tensor, limits),
        retention=_retention(tensor),
    )


def parse_handoff(tensor: TensorLookup) -> bytes:
    """Return the handoff in context_phase_params; raises EngineError if it is missing."""
    blob = tensor("context_phase_params")
    if blob is None or blob.size == 0:
        raise EngineError(errors.CONTEXT_PARAMS_MISSING)
    return blob.tobytes()


def _prompt(tensor: TensorLookup, limits: RequestLimits) -> npt.NDArray[np.int32]:
    ids = tensor("input_ids")
    if ids is None:
        raise EngineError(errors.MISSING_INPUT.format(field="input_ids"))
    count = int(_scalar(tensor, "input_lengths", is_required=True))
    if not 1 <= count <= ids.size:
        raise _bad_value(
            "input_lengths",
            count,
            f"1..{ids.size} (tokens in input_ids)" if ids.size else "a prompt of >= 1 token",
        )
    prompt = np.array(ids.reshape(-1)[:count], dtype=np.int32)
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= limits.vocab_size:
        raise _bad_value("input_ids", low if low < 0 else high, f"0..{limits.vocab_size - 1}")
    return prompt


def _sampling(tensor: TensorLookup, limits: RequestLimits) -> SamplingParams:
    temperature = float(_scalar(tensor, "temperature", default=0.0))
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise _bad_value("temperature", temperature, "a finite number >= 0")
    top_p = float(_scalar(tensor, "runtime_top_p", default=0.0))
    if not top_p <= 1.0:  # rejects NaN, too; <= 0 means unset
        raise _bad_value("runtime_top_p", top_p, "<= 1, and <= 0 for unset")
    top_k = int(_scalar(tensor, "runtime_top_k", default=0))
    if top_k < 0:
        raise _bad_value("runtime_top_k", top_k, ">= 0, and 0 for unset")
    seed = int(_scalar(tensor, "seed", default=0))
    top_log_probs = int(_scalar(tensor, "return_top_log_probs", default=0))
    if not 0 <= top_log_probs <= TOP_LOG_PROBS_MAX:
        raise _bad_value("return_top_log_probs", top_log_probs, f"0..{TOP_LOG_PROBS_MAX}")
    count = min(top_log_probs, limits.vocab_size)
    return SamplingParams(temperature, top_k, top_p, seed, _flag(tensor, "return_log_probs"), count)


def _end_ids(tensor: TensorLookup) -> frozenset[int]:
    """Return the tokens that end the output: `end_id`, and the words of `stop_words_list`, of one token each."""
    end_id = int(_scalar(tensor, "end_id", default=-1))
    ends = {end_id} if end_id >= 0 else set()
    words = tensor("stop_words_list")
    if words is None:
        return frozenset(ends)
    ids, offsets = words.reshape(2, -1)
    offsets = offsets[offsets >= 0]
    if not np.array_equal(offsets, np.arange(1, len(offsets) + 1)):
        raise _bad_value("stop_words_list", offsets[:8].tolist(), "words of one token")
    return frozenset(ends | set(ids[: len(offsets)].tolist()))


def _output_start(parameters: str, prompt_tokens: int) -> int | None:
    """Return the position in the prompt at which the output began, from the request parameter `output_start`."""
    text = str(json.loads(parameters or "{}").get("output_start", ""))
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= prompt_tokens):
        raise _bad_value("output_start", text[:20], f"0..{prompt_tokens}")
    return int(text)


def _adjustments(tensor: TensorLookup, limits: RequestLimits) -> Adjustments:
    frequency = _number(tensor, "frequency_penalty", 0.0, -PENALTY_MAX, PENALTY_MAX)
    presence = _number(tensor, "presence_penalty", 0.0, -PENALTY_MAX, PENALTY_MAX)
    repetition = _number(tensor, "repetition_penalty", 1.0, REPETITION_MIN * (1 - 2**-23), REPETITION_MAX)
    output_tokens_min = int(_scalar(tensor, "min_tokens", default=0))
    if output_tokens_min < 0:
        raise _bad_value("min_tokens", output_tokens_min, ">= 0")
    bias = tensor("embedding_bias")
    if bias is not None:
        bias = np.array(bias.reshape(-1), dtype=np.float32)
        if bias.size != limits.vocab_size or not np.isfinite(bias).all():
            raise _bad_value("embedding_bias", f"{bias.size} values", f"{limits.vocab_size} finite values")
    return Adjustments(frequency, presence, repetition, bias, output_tokens_min)


def _guide(tensor: TensorLookup, limits: RequestLimits) -> GuideText | None:
    kind, guide = _text(tensor, "guided_decoding_guide_type"), _text(tensor, "guided_decoding_guide")
    if kind is None and guide is None:
        return None
    if not limits.has_guides:
        raise _bad_value("guided_decoding_guide_type", kind, "none, because this model has no tokenizer")
    try:
        found = GuideKind(kind)
    except ValueError:
        allowed = ", ".join(one.value for one in GuideKind)
        raise _bad_value("guided_decoding_guide_type", kind, allowed) from None
    return GuideText(found, guide or "")


def _lora_id(tensor: TensorLookup, limits: RequestLimits) -> int | None:
    value = _scalar(tensor, "lora_task_id", default=None)
    if value is None:
        return None
    if int(value) not in limits.lora_ids:
        allowed = ", ".join(map(str, sorted(limits.lora_ids))) or "none, because this model has no adapter"
        raise _bad_value("lora_task_id", int(value), allowed)
    return int(value)


def _retention(tensor: TensorLookup) -> Retention | None:
    """Return the retention of the request's blocks; None without `retention_token_range_starts`, as in the C++ backend."""
    prefix = "retention_token_range_"
    if tensor(f"{prefix}starts") is None:
        return None
    starts = _numbers(tensor, f"{prefix}starts", 0, 2**31 - 1)
    ends = _numbers(tensor, f"{prefix}ends", -1, 2**31 - 1, count=len(starts))
    priorities = _numbers(tensor, f"{prefix}priorities", 0, PRIORITY_MAX, count=len(starts))
    has_durations = tensor(f"{prefix}durations_ms") is not None
    durations = (
        _numbers(tensor, f"{prefix}durations_ms", -1, 2**31 - 1, count=len(starts))
        if has_durations
        else [-1] * len(starts)
    )
    for start, end in zip(starts, ends, strict=True):
        if 0 <= end <= start:
            raise _bad_value(f"{prefix}ends", end, f"above its start {start}, or -1 for the prompt's end")
    ranges = zip(starts, ends, priorities, durations, strict=True)
    decode_priority = int(_number(tensor, "retention_decode_priority", PRIORITY_DEFAULT, 0, PRIORITY_MAX))
    decode_duration_ms = int(_number(tensor, "retention_decode_duration_ms", -1, -1, 2**31 - 1))
    return Retention(
        tuple(
            RetentionRange(start, _or_none(end), priority, _or_none(duration))
            for start, end, priority, duration in ranges
        ),
        decode_priority,
        _or_none(decode_duration_ms),
    )


def _or_none(value: int) -> int | None:
    """Return the value; None for -1, which stands for no end and no expiry on the wire."""
    return None if value < 0 else value


def _numbers(tensor: TensorLookup, field: str, low: int, high: int, *, count: int | None = None) -> list[int]:
    values = tensor(field)
    if values is None:
        raise EngineError(errors.MISSING_INPUT.format(field=field))
    found: list[int] = values.reshape(-1).tolist()
    if count is not None and len(found) != count:
        raise _bad_value(field, f"{len(found)} values", f"{count}, as many as starts")
    for value in found:
        if not low <= value <= high:
            raise _bad_value(field, value, f"{low}..{high}")
    return found


def _text(tensor: TensorLookup, field: str) -> str | None:
    value = _scalar(tensor, field, default=None)
    if value is None:
        return None
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise _bad_value(field, "bytes", "UTF-8") from None


def _number(tensor: TensorLookup, field: str, default: float, low: float, high: float) -> float:
    value = float(_scalar(tensor, field, default=default))
    if not low <= value <= high:  # rejects NaN, too
        raise _bad_value(field, value, f"{low:g}..{high:g}")
    return value


def _scalar(tensor: TensorLookup, field: str, *, default: float | None = 0, is_required: bool = False) -> Any:
    value = tensor(field)
    if value is None:
        if is_required:
            raise EngineError(errors.MISSING_INPUT.format(field=field))
        return default
    if value.size != 1:
        raise _bad_value(field, f"{value.size} values", "exactly one value")
    return value.reshape(-1)[0]


def _flag(tensor: TensorLookup, field: str) -> bool:
    return bool(_scalar(tensor, field, default=False))


def _bad_value(field: str, value: object, allowed: str) -> EngineError:
    return EngineError(errors.BAD_VALUE.format(field=field, value=value, allowed=allowed))
