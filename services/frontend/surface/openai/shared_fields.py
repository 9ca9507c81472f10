"""Fields that chat completions and completions share, and their translation into sampling parameters and limits. Pure.

Names are those of OpenAI's API, and of vLLM where OpenAI has none. A field that the mesh cannot serve is declared too, so
that its refusal names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb

INT32_MAX: Final = (1 << 31) - 1
UINT64_MAX: Final = (1 << 64) - 1
MILLISECONDS_MAX: Final = 86_400_000
"""Longest time that a field takes: a day. The mesh shortens it to the longest runtime of the class."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of an answer that is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Only false or absent: the mesh does not pad events."""
    continuous_usage_stats: bool | None = None
    """Only false or absent: the usage comes once, at the end."""


class SharedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """See the module. None: absent, which is the same as null."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    n: int | None = None
    # Extensions: names of vLLM, then those of kvmesh.
    top_k: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    ttft_timeout_ms: float | None = None
    deadline_ms: float | None = None
    # Fields of OpenAI's API that the mesh does not serve.
    metadata: Any = None
    service_tier: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # Fields of vLLM that the mesh does not serve. Its clients send them with the values that ask for nothing.
    min_p: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    return_tokens_as_token_ids: Any = None
    add_special_tokens: Any = None

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
}
"""Values of fields that are not served which ask for nothing, beside null."""


def unserved(fields: msgspec.Struct, defaults: Mapping[str, tuple[Any, ...]]) -> Iterator[Violation]:
    """Yield the fields that ask for something that the mesh does not serve. `defaults`: values that ask for nothing."""
    for name, harmless in defaults.items():
        value = getattr(fields, name)
        if value is not None and value not in harmless:
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
    wrong = [
        *_outside("seed", fields.seed, 0, UINT64_MAX),
        *_outside(max_tokens[0], max_tokens[1], 1, INT32_MAX),
        *_outside("top_k", fields.top_k, -1, INT32_MAX),
        *_outside("min_tokens", fields.min_tokens, 0, INT32_MAX),
        *_outside("priority", fields.priority, -100, 100),
        *_outside("ttft_timeout_ms", fields.ttft_timeout_ms, 1, MILLISECONDS_MAX),
        *_outside("deadline_ms", fields.deadline_ms, 1, MILLISECONDS_MAX),
        *(
            violation
            for index, each in enumerate(fields.stop_token_ids or ())
            for violation in _outside(f"stop_token_ids[{index}]", each, 0, INT32_MAX)
        ),
    ]
    biases = dict(_biases(fields.logit_bias or {}, wrong))
    if wrong:
        raise invalid("FIELD_OUT_OF_RANGE", wrong[:16])
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
    if fields.stop is not None:
        sampling.stop.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop)
    for token, bias in biases.items():
        sampling.logit_bias[token] = bias
    if fields.stop_token_ids:
        sampling.stop_token_ids.extend(fields.stop_token_ids)
    if fields.ignore_eos:
        sampling.ignore_eos = True
    if max_tokens[1] is not None:
        limits.max_output_tokens = max_tokens[1]
    if fields.priority is not None:
        limits.priority = fields.priority
    if fields.ttft_timeout_ms is not None:
        limits.ttft_timeout.FromNanoseconds(round(fields.ttft_timeout_ms * 1e6))


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
