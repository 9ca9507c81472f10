"""Sampling parameters of a client's message: ranges, the defaults of the model, and a digest. Pure."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from kvmesh.attach.v1 import attach_pb2
from kvmesh.errors import Violation
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.folder import SamplingDefaults
from services.frontend.requests.sampling import Guide, Sampling

TEMPERATURE_MAX: Final = 10.0
TOP_K_MAX: Final = 1_000_000
STOP_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 256
PENALTY_MAX: Final = 2.0
REPETITION_MIN: Final = 0.01
REPETITION_LEAST: Final = REPETITION_MIN * (1 - 2**-23)
"""A little less: the nearest 32-bit number is below it."""
REPETITION_MAX: Final = 10.0
BIASES_MAX: Final = 1024
BIAS_MAX: Final = 100.0
STOP_TOKENS_MAX: Final = 64
ALTERNATIVES_MAX: Final = 20
GUIDE_BYTES_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """The parameters of a request without its seed. `written` and `resolved` differ where the model has a default."""

    resolved: Sampling
    written: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignores_eos: bool

    def add_to(self, state: xxhash.xxh3_64, max_output_tokens: int, *, is_written: bool) -> None:
        """Add all that shapes the output, except the seed. A request of release 0.1.0 adds what it added there."""
        one = self.written if is_written else self.resolved
        state.update(struct.pack("<ffII", one.temperature, one.top_p, one.top_k, max_output_tokens))
        for string in self.stop:
            encoded = string.encode()
            state.update(struct.pack("<I", len(encoded)))
            state.update(encoded)
        later = (
            one.frequency_penalty,
            one.presence_penalty,
            one.repetition_penalty,
            one.bias,
            one.min_tokens,
            one.alternatives,
            one.guide,
            self.stop_token_ids,
            self.ignores_eos,
        )
        if later != _LATER:
            state.update(b"\0sampling\0" + repr(later).encode())


_LATER: Final = (0.0, 0.0, 1.0, (), 0, 0, None, (), False)


def violations(
    sampling: pb.Sampling, top_logprobs: int, vocab_size: int, max_output_tokens: int
) -> Iterator[Violation]:
    """Yield what is out of range. `max_output_tokens`: that of the request."""
    # Comparisons are written so that NaN fails them.
    if sampling.HasField("temperature") and not 0 <= sampling.temperature <= TEMPERATURE_MAX:
        yield Violation("sampling.temperature", _number(sampling.temperature), f"0 to {TEMPERATURE_MAX:g}")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield Violation("sampling.top_p", _number(sampling.top_p), "above 0 to 1")
    if not 0 <= sampling.top_k <= TOP_K_MAX:
        yield Violation("sampling.top_k", str(sampling.top_k), f"0 to {TOP_K_MAX}")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(sampling, name)
        if not -PENALTY_MAX <= value <= PENALTY_MAX:
            yield Violation(f"sampling.{name}", _number(value), f"-{PENALTY_MAX:g} to {PENALTY_MAX:g}")
    repetition = sampling.repetition_penalty
    if sampling.HasField("repetition_penalty") and not REPETITION_LEAST <= repetition <= REPETITION_MAX:
        allowed = f"{REPETITION_MIN:g} to {REPETITION_MAX:g}"
        yield Violation("sampling.repetition_penalty", _number(repetition), allowed)
    yield from _biases(sampling, vocab_size)
    if sampling.min_tokens and not 0 <= sampling.min_tokens <= max_output_tokens:
        allowed = f"0 to {max_output_tokens}, the output tokens of the request,"
        yield Violation("sampling.min_tokens", str(sampling.min_tokens), allowed)
    if len(sampling.stop_token_ids) > STOP_TOKENS_MAX:
        what = f"{len(sampling.stop_token_ids)} ids"
        yield Violation("sampling.stop_token_ids", what, f"at most {STOP_TOKENS_MAX}")
    else:
        for index, each in enumerate(sampling.stop_token_ids):
            if not 0 <= each < vocab_size:
                yield Violation(f"sampling.stop_token_ids[{index}]", str(each), f"0 to {vocab_size - 1}")
    if sampling.n not in (0, 1):
        yield Violation(
            "sampling.n", str(sampling.n), "1: several outputs of one request are not served; 0 or 1"
        )
    if not 0 <= top_logprobs <= ALTERNATIVES_MAX:
        yield Violation("options.top_logprobs", str(top_logprobs), f"0 to {ALTERNATIVES_MAX}")
    if sampling.HasField("guide"):
        yield from _guide(sampling.guide)
    yield from _stop(sampling)


def asked(sampling: pb.Sampling, top_logprobs: int, defaults: SamplingDefaults) -> AskedSampling:
    """Return the parameters in `sampling`, which has no violation."""
    written = Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        bias=tuple((each, value) for each, value in sorted(sampling.logit_bias.items()) if value),
        min_tokens=sampling.min_tokens,
        alternatives=top_logprobs,
        guide=_guide_of(sampling.guide) if sampling.HasField("guide") else None,
    )
    found = {
        name: value
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(defaults, name)) is not None and not sampling.HasField(name)
    }
    return AskedSampling(
        resolved=replace(written, **found),
        written=written,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(dict.fromkeys(sampling.stop_token_ids)),
        ignores_eos=sampling.ignore_eos,
    )


def _biases(sampling: pb.Sampling, vocab_size: int) -> Iterator[Violation]:
    if len(sampling.logit_bias) > BIASES_MAX:
        yield Violation("sampling.logit_bias", f"{len(sampling.logit_bias)} tokens", f"at most {BIASES_MAX}")
        return
    for token_id, value in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield Violation(
                f"sampling.logit_bias[{token_id}]", "of an unknown token", f"0 to {vocab_size - 1}"
            )
        if not -BIAS_MAX <= value <= BIAS_MAX:
            yield Violation(
                f"sampling.logit_bias[{token_id}]", _number(value), f"-{BIAS_MAX:g} to {BIAS_MAX:g}"
            )


def _stop(sampling: pb.Sampling) -> Iterator[Violation]:
    if len(sampling.stop) > STOP_MAX:
        yield Violation("sampling.stop", f"{len(sampling.stop)} strings", f"at most {STOP_MAX}")
        return
    for index, string in enumerate(sampling.stop):
        if not 1 <= len(string) <= STOP_CHARACTERS_MAX:
            what = f"{len(string)} characters long"
            yield Violation(f"sampling.stop[{index}]", what, f"1 to {STOP_CHARACTERS_MAX} characters")


def _guide(guide: pb.Guide) -> Iterator[Violation]:
    """Yield a violation for a form of the wrong size, or that is no JSON. `guide_check` looks whether it can be met."""
    kind = guide.WhichOneof("form")
    if kind is None or (kind == "json" and not guide.json):
        yield Violation("sampling.guide", "empty", "one of json_schema, regex and json")
        return
    path, text = f"sampling.guide.{kind}", getattr(guide, kind) if kind != "json" else ""
    size = len(text.encode())
    if kind != "json" and not 0 < size <= GUIDE_BYTES_MAX:
        yield Violation(path, f"{size} bytes long", f"1 to {GUIDE_BYTES_MAX} bytes")
        return
    try:
        if kind == "json_schema":
            json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"not JSON: {(str(error) or type(error).__name__).splitlines()[0][:100]}"
        yield Violation(path, what, "a JSON schema")


def _guide_of(guide: pb.Guide) -> Guide:
    match guide.WhichOneof("form"):
        case "json_schema":
            return Guide(attach_pb2.Guide.KIND_JSON_SCHEMA, guide.json_schema)
        case "regex":
            return Guide(attach_pb2.Guide.KIND_REGEX, guide.regex)
        case _:
            return Guide(attach_pb2.Guide.KIND_JSON)


def _number(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else str(value)
