"""Parses a client's bytes into a message, then into a checked request with a prompt of token ids.

Raises MeshError for a refused message. The model version is chosen between the two steps. A thread parses and checks a big
message, and a thread tokenizes a big prompt.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Final, NamedTuple

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.chat_template import TemplateError, TemplateTooLong
from kvmesh.tenants.caller import ServiceClass
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import ResumeToken, Seal
from services.frontend.surface import validation, wire
from services.frontend.surface.served_versions import ServedVersion, ServedVersions
from services.frontend.surface.validation import Bounds, ValidRequest

THREAD_BYTES_MIN: Final = 8192
"""Size from which a thread checks a message or tokenizes a prompt.

Either takes some milliseconds, in which the event loop would serve no other stream.
"""


class Message(NamedTuple):
    """A parsed message, not checked yet."""

    request: pb.GenerateRequest
    resume: ResumeToken | None
    """Its resume token. None: it has none, or none that can be read; `check` then refuses the message."""
    is_big: bool


class Parsed(NamedTuple):
    """A checked and tokenized request."""

    asked: ValidRequest
    prompt_ids: bytes
    """32-bit little-endian."""
    bounds: Bounds
    """Bounds of the model version and of the caller's service class."""
    version: ServedVersion

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4


class RequestParser:
    """Parses requests for all served versions. `seal` verifies the mesh's resume tokens."""

    def __init__(self, versions: ServedVersions, seal: Seal, *, message_bytes_max: int) -> None:
        self._versions = versions
        self._seal = seal
        self._message_bytes_max = message_bytes_max
        self._big = asyncio.Lock()
        """Held while a thread checks a big message: several such threads would take the CPU from the event loop."""

    async def read(self, data: bytes) -> Message:
        """Return the message in `data`. Raises MeshError."""
        if len(data) < THREAD_BYTES_MIN:
            return Message(*self._read(data), is_big=False)
        async with self._big:
            return Message(*await asyncio.to_thread(self._read, data), is_big=True)

    async def check(self, message: Message, version: ServedVersion, service_class: ServiceClass) -> Parsed:
        """Return the request in `message`, for `version`, of a caller of `service_class`. Raises MeshError."""
        bounds = version.bounds(service_class)
        if not message.is_big:
            asked = validation.check(message.request, bounds, self._seal)
        else:
            async with self._big:
                asked = await asyncio.to_thread(validation.check, message.request, bounds, self._seal)
        ids = await _tokenize(asked, version)
        return Parsed(asked, array("i", ids).tobytes(), bounds, version)

    def _read(self, data: bytes) -> tuple[pb.GenerateRequest, ResumeToken | None]:
        request = wire.parse(data, self._message_bytes_max, self._versions.max_sequence_tokens)
        if not request.options.HasField("resume"):
            return request, None
        try:
            return request, resume_token.unpack(request.options.resume.resume_token, self._seal)
        except resume_token.ResumeTokenError:
            return request, None


async def _tokenize(asked: ValidRequest, version: ServedVersion) -> list[int] | tuple[int, ...]:
    if asked.token_ids is not None:
        return asked.token_ids
    if asked.prompt_bytes < THREAD_BYTES_MIN:
        return _encode(asked, version)
    return await asyncio.to_thread(_encode, asked, version)


def _encode(asked: ValidRequest, version: ServedVersion) -> list[int]:
    """Return the ids of a text or a conversation. Raises MeshError if the chat template refuses the conversation."""
    if asked.text is not None:
        return version.tokenizer.encode(asked.text)
    assert asked.chat is not None
    try:
        return version.tokenizer.encode_chat(asked.chat)
    except TemplateTooLong as error:
        raise invalid("PROMPT_TOO_LONG", [_refused(error)]) from None
    except TemplateError as error:
        raise invalid("TEMPLATE_REFUSED", [_refused(error)]) from None


def _refused(error: TemplateError) -> Violation:
    return Violation("chat.messages", "not taken", f"{error}", is_clause=True)
