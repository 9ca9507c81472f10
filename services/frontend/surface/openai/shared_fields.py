"""Fields that chat completions and completions share, and their translation into sampling parameters and limits. Pure.

Names are those of OpenAI's API, and of vLLM where OpenAI has none. A field that the mesh cannot serve is declared too, so
that its refusal names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kvmesh.errors import MAX_VIOLATIONS, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.openai.json_body import ABSENT, JsonReader, bounded, is_set

INT32_MAX: Final = (1 << 31) - 1
UINT64_MAX: Final = (1 << 64) - 1
TTFT_MILLISECONDS_MAX: Final = 3_600_000
HARMLESS_BYTES_MAX: Final = 64
"""Longest value that may ask for nothing."""
STOP_BYTES_MAX: Final = 65_536
IDS_BYTES_MAX: Final = 16_384
BIASES_BYTES_MAX: Final = 65_536
"""Longest JSON of these fields, above what their numbers of entries need."""
OBJECT_SCHEMA: Final = '{"type":"object"}'
"""Schema of a `json_object`: OpenAI's clients read its members."""

MILLISECONDS_MAX: Final = 86_400_000
"""Longest time that a field takes: a day. The mesh shortens it to the longest runtime of the class."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of an answer that is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Only false or absent: the mesh does not pad events."""
    continuous_usage_stats: bool | None = None
    """Only false or absent: the usage comes once, at the end."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of an output."""

    name: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Form of the output."""

    type: str
    json_schema: JsonSchema | None = None


class SharedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """See the module. None: absent, the same as null. Fields of type Raw are decoded within bounds, or not at all."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: msgspec.Raw = ABSENT
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: msgspec.Raw = ABSENT
    user: str | None = None
    prompt_cache_key: str | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    # Extensions: names of vLLM, then those of kvmesh.
    top_k: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: msgspec.Raw = ABSENT
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    ttft_timeout_ms: float | None = None
    deadline_ms: float | None = None
    # Fields of OpenAI's API that the mesh does not serve.
    metadata: msgspec.Raw = ABSENT
    service_tier: msgspec.Raw = ABSENT
    store: msgspec.Raw = ABSENT
    safety_identifier: msgspec.Raw = ABSENT
    prompt_cache_retention: msgspec.Raw = ABSENT
    prompt_cache_options: msgspec.Raw = ABSENT
    # Fields of vLLM that the mesh does not serve. Its clients send them with the values that ask for nothing.
    min_p: msgspec.Raw = ABSENT
    length_penalty: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    skip_special_tokens: msgspec.Raw = ABSENT
    spaces_between_special_tokens: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    prompt_logprobs: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    return_tokens_as_token_ids: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT
    mm_processor_kwargs: msgspec.Raw = ABSENT

    @property
    def streams(self) -> bool:
        """True if the answer is streamed."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """True if the last event before the end has the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def deadline_s(self) -> float | None:
        """Seconds from the arrival of the request to its deadline. None: the mesh's default."""
        return None if self.deadline_ms is None else self.deadline_ms / 1000.0


DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "safety_identifier": (),
    "prompt_cache_retention": ("in_memory",),
    "prompt_cache_options": ({},),
    "min_p": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "cache_salt": (),
    "request_id": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Values of fields that are not served which ask for nothing, beside null."""


def asks(value: msgspec.Raw, harmless: tuple[Any, ...] = ()) -> bool:
    """Return True if a field is set to another value than null and those that ask for nothing."""
    if not is_set(value):
        return False
    data = bytes(value)
    return len(data) > HARMLESS_BYTES_MAX or msgspec.json.decode(data) not in harmless


def unserved(fields: msgspec.Struct, defaults: Mapping[str, tuple[Any, ...]]) -> Iterator[Violation]:
    """Yield the fields that ask for something that the mesh does not serve. `defaults`: values that ask for nothing."""
    for name, harmless in defaults.items():
        if asks(getattr(fields, name), harmless):
            allowed = " or ".join(["absent", *(msgspec.json.encode(each).decode() for each in harmless)])
            yield Violation(name, "set", f"the mesh does not serve it; {allowed} is allowed", is_clause=True)


def check_served(fields: SharedFields, further: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise MeshError (FEATURE_UNSUPPORTED) with the names of all fields that ask for something that is not served."""
    found = [*unserved(fields, DEFAULTS), *unserved(fields, further)]
    if fields.n not in (None, 1):
        found.append(Violation("n", str(fields.n), "1"))
    options = fields.stream_options
    found += [
        Violation(f"stream_options.{name}", "true", "absent or false")
        for name in ("include_obfuscation", "continuous_usage_stats")
        if options is not None and getattr(options, name)
    ]
    if found:
        raise invalid("FEATURE_UNSUPPORTED", found)
    if options is not None and not fields.streams:
        raise invalid(
            "FIELD_OUT_OF_RANGE",
            [Violation("stream_options", "set", "it is allowed only with stream = true", is_clause=True)],
        )


def into_request(
    fields: SharedFields, max_tokens: tuple[str, int | None], request: pb.GenerateRequest
) -> None:
    """Put the shared fields into `request`. `max_tokens`: name and value of the output limit. Raises MeshError.

    Ranges that the protocol cannot hold are refused here. The mesh checks all others.
    """
    stop = bounded("stop", fields.stop, _STOP, STOP_BYTES_MAX)
    stop_token_ids = bounded("stop_token_ids", fields.stop_token_ids, _IDS, IDS_BYTES_MAX)
    given = bounded("logit_bias", fields.logit_bias, _BIASES, BIASES_BYTES_MAX)
    wrong = [
        *_outside("seed", fields.seed, 0, UINT64_MAX),
        *_outside(max_tokens[0], max_tokens[1], 1, INT32_MAX),
        *_outside("top_k", fields.top_k, -1, INT32_MAX),
        *_outside("min_tokens", fields.min_tokens, 0, INT32_MAX),
        *_outside("priority", fields.priority, -100, 100),
        *_outside("ttft_timeout_ms", fields.ttft_timeout_ms, 1, TTFT_MILLISECONDS_MAX),
        *_outside("deadline_ms", fields.deadline_ms, 1, MILLISECONDS_MAX),
        *(
            violation
            for index, each in enumerate(stop_token_ids or ())
            for violation in _outside(f"stop_token_ids[{index}]", each, 0, INT32_MAX)
        ),
    ]
    biases = dict(_biases(given or {}, wrong))
    if wrong:
        raise invalid("FIELD_OUT_OF_RANGE", wrong[:MAX_VIOLATIONS])
    if fields.response_format is not None:
        _put_format(fields.response_format, request.sampling)
    if fields.model:
        request.model = fields.model
    session = fields.prompt_cache_key or fields.user
    if session:
        request.session_id = session
    sampling, limits = request.sampling, request.limits
    for name in ("temperature", "top_p", "seed", "repetition_penalty", "min_tokens"):
        value = getattr(fields, name)
        if value is not None:
            setattr(sampling, name, value)
    if fields.top_k is not None:
        sampling.top_k = max(0, fields.top_k)
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(fields, name)
        if value:
            setattr(sampling, name, value)
    if stop is not None:
        sampling.stop.extend([stop] if isinstance(stop, str) else stop)
    for token, bias in biases.items():
        sampling.logit_bias[token] = bias
    if stop_token_ids:
        sampling.stop_token_ids.extend(stop_token_ids)
    if fields.ignore_eos:
        sampling.ignore_eos = True
    if max_tokens[1] is not None:
        limits.max_output_tokens = max_tokens[1]
    if fields.priority is not None:
        limits.priority = fields.priority
    if fields.ttft_timeout_ms is not None:
        limits.ttft_timeout.FromNanoseconds(round(fields.ttft_timeout_ms * 1e6))


_STOP: Final = JsonReader(str | list[str], "stop")
_IDS: Final = JsonReader(list[int], "stop_token_ids")
_BIASES: Final = JsonReader(dict[str, float], "logit_bias")


def _put_format(wanted: ResponseFormat, sampling: pb.Sampling) -> None:
    match wanted.type:
        case "text":
            return
        case "json_object":
            sampling.guide.json_schema = OBJECT_SCHEMA
        case "json_schema":
            if wanted.json_schema is None or not is_set(wanted.json_schema.schema):
                what = Violation("response_format.json_schema.schema", "missing", "a JSON schema")
                raise invalid("FIELD_OUT_OF_RANGE", [what])
            sampling.guide.json_schema = bytes(wanted.json_schema.schema).decode()
        case _:
            allowed = '"text", "json_object" or "json_schema"'
            what = Violation("response_format.type", repr(wanted.type[:40]), allowed)
            raise invalid("FEATURE_UNSUPPORTED", [what])


def _outside(name: str, value: float | None, least: int, most: int) -> Iterator[Violation]:
    if value is not None and not least <= value <= most:
        yield Violation(name, str(value)[:40], f"{least} to {most}")


def _biases(given: Mapping[str, float], wrong: list[Violation]) -> Iterator[tuple[int, float]]:
    """Yield token id and bias; what is no token id goes into `wrong`."""
    for name, bias in given.items():
        if len(name) <= 10 and name.isascii() and name.isdigit() and int(name) <= INT32_MAX:
            yield int(name), bias
        else:
            wrong.append(Violation(f"logit_bias.{name[:40]}", "no token id", f"0 to {INT32_MAX} as text"))
