"""Inputs that both models have, under names of their own: sampling, limits, counts, guides. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from services.frontend.surface.kserve.asked import Asked, Input, Take
from services.frontend.surface.kserve.tensors import (
    BOOL,
    BYTES,
    FP32,
    INT32,
    UINT64,
    Declared,
    refused,
    texts,
)

NO_END_TOKEN: Final = -1
"""Value of end_id: no token ends the output."""


def sampled(field: str) -> Take:
    """Return a Take that sets a field of Sampling."""

    def take(asked: Asked, _: str, values: Sequence[Any]) -> None:
        setattr(asked.request.sampling, field, values[0])

    return take


def flag(attribute: str) -> Take:
    """Return a Take that sets a flag of Asked."""

    def take(asked: Asked, _: str, values: Sequence[Any]) -> None:
        setattr(asked, attribute, bool(values[0]))

    return take


def only(*allowed: float, why: str) -> Take:
    """Return a Take that accepts these values alone, which change nothing."""

    def take(_: Asked, name: str, values: Sequence[Any]) -> None:
        if values[0] not in allowed:
            said = " or ".join(
                f"{each:g}" if not isinstance(each, bool) else str(each).lower() for each in allowed
            )
            raise refused(name, _said(values[0]), f"{said}: {why};")

    return take


def no_words(what: str) -> Take:
    """Return a Take that accepts empty words alone."""

    def take(_: Asked, name: str, values: Sequence[Any]) -> None:
        if any(values):
            raise refused(name, "set", f"only an empty word: {what};")

    return take


def scalar(name: str, datatype: str, take: Take, field: str = "", *, is_required: bool = False) -> Input:
    """Return an input with one value."""
    return Input(Declared(name, datatype), take, field, is_required)


def by_name(inputs: Iterable[Input]) -> dict[str, Input]:
    """Return the inputs by name."""
    return {each.tensor.name: each for each in inputs}


def shared(top_k: str, top_p: str, length_penalty: str) -> list[Input]:
    """Return the inputs that both models have; three have different names."""
    return [
        scalar("temperature", FP32, sampled("temperature"), "sampling.temperature"),
        scalar(top_p, FP32, _top_p, "sampling.top_p"),
        scalar(top_k, INT32, sampled("top_k"), "sampling.top_k"),
        scalar("seed", UINT64, sampled("seed"), "sampling.seed"),
        scalar("repetition_penalty", FP32, sampled("repetition_penalty"), "sampling.repetition_penalty"),
        scalar("presence_penalty", FP32, sampled("presence_penalty"), "sampling.presence_penalty"),
        scalar("frequency_penalty", FP32, sampled("frequency_penalty"), "sampling.frequency_penalty"),
        scalar("min_tokens", INT32, _min_tokens, "sampling.min_tokens"),
        scalar("min_length", INT32, _min_tokens),
        scalar("end_id", INT32, _end_id),
        scalar("pad_id", INT32, _pad_id),
        scalar("exclude_input_in_output", BOOL, flag("excludes_prompt")),
        scalar("return_log_probs", BOOL, _log_probs),
        scalar("return_num_input_tokens", BOOL, flag("input_count")),
        scalar("return_num_output_tokens", BOOL, flag("output_count")),
        scalar("return_context_logits", BOOL, only(False, why="the mesh returns no logits")),
        scalar("return_generation_logits", BOOL, only(False, why="the mesh returns no logits")),
        scalar("return_perf_metrics", BOOL, only(False, why="the last response has the counts of the mesh")),
        scalar("beam_width", INT32, only(1, why="the mesh searches no beams")),
        scalar("num_return_sequences", INT32, only(1, why="one request has one output")),
        scalar(length_penalty, FP32, only(0.0, 1.0, why="it changes beams alone")),
        scalar("guided_decoding_guide_type", BYTES, _given),
        scalar("guided_decoding_guide", BYTES, _given, "sampling.guide"),
    ]


OUTPUTS: Final = (
    Declared("cum_log_probs", FP32, (-1,)),
    Declared("output_log_probs", FP32, (-1, -1)),
    Declared("num_input_tokens", INT32),
    Declared("num_output_tokens", INT32),
)
"""Outputs that both models have."""


def finish_guide(asked: Asked) -> None:
    """Set the guide of the request from its two inputs. Raises MeshError."""
    kind, guide = asked.given.get("guided_decoding_guide_type"), asked.given.get("guided_decoding_guide")
    if kind is None and guide is None:
        return
    if kind is None:
        raise refused(
            "guided_decoding_guide_type", "missing", "one of json, json_schema and regex beside a guide"
        )
    match kind:
        case "json":
            if guide:
                raise refused("guided_decoding_guide", "set", "no guide for the type json")
            asked.request.sampling.guide.json = True
        case "json_schema":
            asked.request.sampling.guide.json_schema = guide or ""
        case "regex":
            asked.request.sampling.guide.regex = guide or ""
        case _:
            raise refused("guided_decoding_guide_type", repr(kind[:32]), "one of json, json_schema and regex")


def _given(asked: Asked, name: str, values: Sequence[Any]) -> None:
    (asked.given[name],) = texts(name, values)


def _top_p(asked: Asked, _: str, values: Sequence[Any]) -> None:
    if not values[0] <= 0:  # TensorRT-LLM counts 0 and less as unset
        asked.request.sampling.top_p = values[0]


def _min_tokens(asked: Asked, name: str, values: Sequence[Any]) -> None:
    set_already = asked.given.get("min_tokens")
    if set_already not in (None, values[0]):
        raise refused(name, str(values[0]), "the value of min_tokens and min_length, which mean the same,")
    asked.given["min_tokens"] = values[0]
    asked.request.sampling.min_tokens = values[0]


def _end_id(asked: Asked, name: str, values: Sequence[Any]) -> None:
    end = values[0]
    if end < NO_END_TOKEN:
        raise refused(name, str(end), "-1 or a token id")
    if asked.end_token_ids == {end}:
        return
    asked.request.sampling.ignore_eos = True
    if end != NO_END_TOKEN:
        asked.request.sampling.stop_token_ids.append(end)


def _pad_id(_: Asked, name: str, values: Sequence[Any]) -> None:
    # One sequence of one request has no padding, so that every token will do.
    if values[0] < -1:
        raise refused(name, str(values[0]), "-1 or a token id")


def _log_probs(asked: Asked, _: str, values: Sequence[Any]) -> None:
    asked.log_probs = bool(values[0])
    asked.request.options.logprobs = asked.log_probs


def _said(value: Any) -> str:
    return str(bool(value)).lower() if isinstance(value, bool) else f"{value:g}"
