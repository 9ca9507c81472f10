"""Parses a client's bytes into a message, then into a checked request with a prompt of token ids.

Raises MeshError for a refused message. The model version is chosen between the two steps. A thread parses and checks a big
message, and a thread tokenizes a big prompt.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.template_budget import Effort, TemplateError, TemplateTooLong, TemplateTooSlow
from kvmesh.models.tokenizer import MARK_BYTES_MAX, Conversation, ModelTokenizer
from kvmesh.tenants.caller import ServiceClass
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import ResumeToken, Seal
from services.frontend.surface import validation, wire
from services.frontend.surface.guide_check import GuideCheck
from services.frontend.surface.served_versions import ServedVersion, ServedVersions
from services.frontend.surface.validation import Bounds, ValidRequest

T = TypeVar("T")

THREAD_BYTES_MIN: Final = 8192
"""Size from which a thread checks a message or tokenizes a prompt.

Either takes some milliseconds, in which the event loop would serve no other stream.
"""


QUICK: Final = Effort(characters=4 * THREAD_BYTES_MIN, steps=2000)
"""Effort of a chat template on the event loop, some milliseconds. A thread renders what needs more."""


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

    def __init__(
        self, versions: ServedVersions, seal: Seal, guides: GuideCheck, *, message_bytes_max: int
    ) -> None:
        self._versions = versions
        self._guides = guides
        self._seal = seal
        self._message_bytes_max = message_bytes_max
        self._big = asyncio.Lock()
        """Held while a thread checks a big message: several such threads would take the CPU from the event loop."""
        self._rendering = asyncio.Lock()
        """The same for conversations that a thread renders."""

    async def read(self, data: bytes) -> Message:
        """Return the message in `data`. Raises MeshError."""
        if len(data) < THREAD_BYTES_MIN:
            return Message(*self._read(data), is_big=False)
        return Message(*await alone(self._big, self._read, data), is_big=True)

    async def check(self, message: Message, version: ServedVersion, service_class: ServiceClass) -> Parsed:
        """Return the request in `message`, for `version`, of a caller of `service_class`. Raises MeshError."""
        bounds = version.bounds(service_class)
        if not message.is_big:
            asked = validation.check(message.request, bounds, self._seal)
        else:
            asked = await alone(self._big, validation.check, message.request, bounds, self._seal)
        await self._guides.check(asked.sampling.resolved.guide)
        ids = await self._tokenize(asked, version)
        return Parsed(asked, array("i", ids).tobytes(), bounds, version)

    async def _tokenize(self, asked: ValidRequest, version: ServedVersion) -> list[int] | tuple[int, ...]:
        """Return the ids of the prompt. Raises MeshError if the chat template refuses the conversation."""
        if asked.token_ids is not None:
            return asked.token_ids
        tokenizer = version.tokenizer
        if asked.chat is None:
            assert asked.text is not None
            if asked.prompt_bytes < THREAD_BYTES_MIN:
                return tokenizer.encode(asked.text)
            return await asyncio.to_thread(tokenizer.encode, asked.text)
        text = await self._render(asked.chat, asked.prompt_bytes, tokenizer)
        _check_size(text, version)
        if len(text) < THREAD_BYTES_MIN:
            return tokenizer.encode_rendered(text)
        return await asyncio.to_thread(tokenizer.encode_rendered, text)

    async def _render(self, chat: Conversation, size: int, tokenizer: ModelTokenizer) -> str:
        """Return the text of `chat`, made by a thread if it is long or takes many steps. Raises MeshError."""
        try:
            if size < THREAD_BYTES_MIN:
                with suppress(TemplateTooLong, TemplateTooSlow):
                    return tokenizer.render(chat, QUICK)
            return await alone(self._rendering, tokenizer.render, chat)
        except TemplateError as error:
            reason = "PROMPT_TOO_LONG" if isinstance(error, TemplateTooLong) else "TEMPLATE_REFUSED"
            raise invalid(
                reason, [Violation("chat.messages", "not taken", f"{error}", is_clause=True)]
            ) from None

    def _read(self, data: bytes) -> tuple[pb.GenerateRequest, ResumeToken | None]:
        request = wire.parse(data, self._message_bytes_max, self._versions.max_sequence_tokens)
        if not request.options.HasField("resume"):
            return request, None
        try:
            return request, resume_token.unpack(request.options.resume.resume_token, self._seal)
        except resume_token.ResumeTokenError:
            return request, None


async def alone(lock: asyncio.Lock, work: Callable[..., T], *args: Any) -> T:
    """Return the result of `work`, which a thread does while it holds `lock`, also if the caller is cancelled meanwhile."""
    async with lock:
        running = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # nobody waits for it
            raise


def _check_size(text: str, version: ServedVersion) -> None:
    """Refuse a rendered text that cannot fit the context, whatever its tokens are, before it is tokenized."""
    bounds = version.widest
    size = len(text.encode())
    size_max = bounds.max_sequence_tokens * max(bounds.token_bytes_max, MARK_BYTES_MAX)
    if size > size_max:
        allowed = f"at most {bounds.max_sequence_tokens - 1} tokens (never more than {size_max} bytes)"
        raise invalid(
            "PROMPT_TOO_LONG", [Violation("chat", f"{size} bytes long by its chat template", allowed)]
        )
