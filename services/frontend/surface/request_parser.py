"""Parses a client's bytes into a checked message and a prompt of token ids. Raises MeshError for a refused message.

A thread parses and checks a big message, and a thread tokenizes a big prompt.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Final, NamedTuple

from kvmesh.tenants.caller import ServiceClass
from services.frontend.requests.resume_token import Seal
from services.frontend.surface import validation, wire
from services.frontend.surface.tokenizer import ModelTokenizer
from services.frontend.surface.validation import Bounds, ValidRequest

THREAD_BYTES_MIN: Final = 8192
"""Size from which a thread checks a message or tokenizes a prompt.

Either takes some milliseconds, in which the event loop would serve no other stream.
"""


class Parsed(NamedTuple):
    """A checked and tokenized request."""

    asked: ValidRequest
    prompt_ids: bytes
    """32-bit little-endian."""
    bounds: Bounds
    """Bounds of the caller's service class."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4


class RequestParser:
    """Parses requests for one model. `seal` verifies the mesh's resume tokens."""

    def __init__(
        self, tokenizer: ModelTokenizer, bounds: Bounds, seal: Seal, *, message_bytes_max: int
    ) -> None:
        self.end_token_id = tokenizer.end_token_id
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._bounds_up_to: dict[int, Bounds] = {}
        """Bounds by the largest output limit of a service class."""
        self._seal = seal
        self._message_bytes_max = message_bytes_max
        self._big = asyncio.Lock()
        """Held while a thread checks a big message: several such threads would take the CPU from the event loop."""

    async def parse(self, data: bytes, service_class: ServiceClass) -> Parsed:
        """Return the request in `data`, of a caller of `service_class`. Raises MeshError."""
        bounds = self._bounds_of(service_class)
        if len(data) < THREAD_BYTES_MIN:
            asked = self._check(data, bounds)
        else:
            async with self._big:
                asked = await asyncio.to_thread(self._check, data, bounds)
        return Parsed(asked, array("i", await self._tokenize(asked)).tobytes(), bounds)

    def _bounds_of(self, service_class: ServiceClass) -> Bounds:
        known = self._bounds_up_to.get(service_class.max_output_tokens)
        if known is None:
            known = self._bounds.up_to(service_class.max_output_tokens)
            self._bounds_up_to[service_class.max_output_tokens] = known
        return known

    def _check(self, data: bytes, bounds: Bounds) -> ValidRequest:
        message = wire.parse(data, self._message_bytes_max, bounds.max_sequence_tokens)
        return validation.check(message, bounds, self._seal)

    async def _tokenize(self, asked: ValidRequest) -> list[int] | tuple[int, ...]:
        if asked.token_ids is not None:
            return asked.token_ids
        if asked.prompt_bytes < THREAD_BYTES_MIN:
            return self._encode(asked)
        return await asyncio.to_thread(self._encode, asked)

    def _encode(self, asked: ValidRequest) -> list[int]:
        if asked.text is not None:
            return self._tokenizer.encode(asked.text)
        return self._tokenizer.encode_chat(asked.chat or ())
