"""POST /tokenize and /detokenize, as vLLM has them: the bodies and the answers. Pure.

A prompt is tokenized by the parser of requests, so the ids are those of a completion with the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import ModelTokenizer
from services.frontend.surface.openai.chat_request import Message, put_messages
from services.frontend.surface.openai.json_body import ABSENT, JsonReader, is_set
from services.frontend.surface.openai.token_texts import TokenTexts


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    """Only true or absent for a prompt, and only false or absent for messages: as completions do it."""
    add_generation_prompt: bool | None = None
    """Only true or absent: as chat completions do it."""


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


_TOKENIZE: Final = JsonReader(TokenizeRequest)
DETOKENIZE: Final = JsonReader(DetokenizeRequest)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of /tokenize."""

    model: str
    data: bytes
    """The encoded GenerateRequest with its prompt."""
    with_texts: bool


def read(data: bytes) -> Asked:
    """Return the request in the body `data`. Raises MeshError."""
    body: TokenizeRequest = _TOKENIZE.read(data)
    return Asked(
        body.model or "", request_of(body).SerializeToString(), with_texts=bool(body.return_token_strs)
    )


def request_of(body: TokenizeRequest) -> pb.GenerateRequest:
    """Return a request with the prompt that is to be tokenized. Raises MeshError."""
    if (body.prompt is None) is (body.messages is None):
        both = "set beside prompt" if body.prompt is not None else "missing"
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("messages", both, "one of prompt and messages")])
    wanted_specials = body.prompt is not None
    if body.add_special_tokens is (not wanted_specials):
        allowed = "true" if wanted_specials else "false"
        what = Violation("add_special_tokens", str(body.add_special_tokens).lower(), f"{allowed} or absent")
        raise invalid("FEATURE_UNSUPPORTED", [what])
    if body.add_generation_prompt is False:
        raise invalid("FEATURE_UNSUPPORTED", [Violation("add_generation_prompt", "false", "true or absent")])
    request = pb.GenerateRequest(model=body.model or "")
    if body.prompt is not None:
        request.text = body.prompt
        return request
    put_messages(body.messages or [], request.chat)
    if is_set(body.tools):
        request.chat.tools_json = bytes(body.tools).decode()
    if is_set(body.chat_template_kwargs):
        request.chat.template_arguments_json = bytes(body.chat_template_kwargs).decode()
    return request


def tokens_answer(
    ids: Sequence[int], max_model_len: int, tokenizer: ModelTokenizer, *, with_texts: bool
) -> bytes:
    """Return the answer of /tokenize."""
    texts = TokenTexts(tokenizer)
    strings = [texts.text(each) for each in ids] if with_texts else None
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
    )


def text_answer(ids: Sequence[int], tokens_max: int, tokenizer: ModelTokenizer) -> bytes:
    """Return the answer of /detokenize. Raises MeshError for too many ids, and for ids outside the vocabulary."""
    if len(ids) > tokens_max:
        raise invalid("PROMPT_TOO_LONG", [Violation("tokens", f"{len(ids)} tokens", f"at most {tokens_max}")])
    size = tokenizer.vocab_size
    for index, each in enumerate(ids):
        if not 0 <= each < size:
            raise invalid(
                "FIELD_OUT_OF_RANGE", [Violation(f"tokens[{index}]", str(each)[:40], f"0 to {size - 1}")]
            )
    return msgspec.json.encode({"prompt": tokenizer.decode(ids)})
