"""POST /v1/completions: the body, and its translation into a request of the mesh. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.openai.asked import Asked
from services.frontend.surface.openai.json_body import ABSENT, JsonReader
from services.frontend.surface.openai.shared_fields import INT32_MAX, SharedFields, check_served, into_request

LOGPROBS_MAX: Final = 20


class CompletionRequest(SharedFields, forbid_unknown_fields=True, kw_only=True):
    """The body. Fields without a use here are declared so that their refusal names them."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT


READER: Final = JsonReader(CompletionRequest)

_UNSERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
}
"""As DEFAULTS of shared_fields. A text begins with the model's own special tokens."""


def read(data: bytes) -> Asked:
    """Return the request in the body `data`. Raises MeshError with the names of the wrong fields."""
    body: CompletionRequest = READER.read(data)
    check_served(body, _UNSERVED)
    request = pb.GenerateRequest()
    into_request(body, ("max_tokens", body.max_tokens), request)
    put_prompt(body.prompt, request)
    if body.logprobs is not None:
        if not 0 <= body.logprobs <= LOGPROBS_MAX:
            what = Violation("logprobs", str(body.logprobs)[:40], f"0 to {LOGPROBS_MAX}")
            raise invalid("FIELD_OUT_OF_RANGE", [what])
        request.options.logprobs = True
        request.options.top_logprobs = body.logprobs
    names = {"options.top_logprobs": "logprobs"}
    if body.prompt_cache_key:
        names["session_id"] = "prompt_cache_key"
    return Asked(
        request, body.streams, body.includes_usage, body.deadline_s, bool(body.return_token_ids), names
    )


def put_prompt(prompt: str | list[str | int | list[int]], request: pb.GenerateRequest) -> None:
    """Put the prompt into `request`: a text, token ids, or a list of exactly one of them. Raises MeshError."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if not prompt:
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("prompt", "empty", "a text or token ids")])
    first = prompt[0]
    if isinstance(first, int):
        ids = prompt
    elif len(prompt) > 1:
        raise invalid(
            "FEATURE_UNSUPPORTED",
            [Violation("prompt", f"a list of {len(prompt)} prompts", "one prompt for each request")],
        )
    elif isinstance(first, str):
        request.text = first
        return
    else:
        ids = list(first)
    for index, each in enumerate(ids):
        if not isinstance(each, int) or not 0 <= each <= INT32_MAX:
            what = str(each)[:40] if isinstance(each, int) else f"of type {type(each).__name__}"
            raise invalid("FIELD_OUT_OF_RANGE", [Violation(f"prompt[{index}]", what, "a token id")])
    request.tokens.ids.extend(ids)  # type: ignore[arg-type]  # all are ints, as checked
