"""One inference as a call of `InferenceService`: its message is translated, and so is its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from kvmesh.call import Call
from kvmesh.clock import Clock
from kvmesh.tenants.catalogue import HEADER
from services.frontend.requests.output import BareTokens
from services.frontend.surface.answer import Message
from services.frontend.surface.intake import CONTINUES_METADATA, HANDOVER_METADATA
from services.frontend.surface.kserve.asked import Inference
from services.frontend.surface.kserve.responses import Responses


class InferCall:
    """Implements Call. `transport` is the call that brought the inference, at `arrived_s`.

    `try_write` and `write` send an encoded response. `on_read` is called when the message was taken, or refused.
    """

    __slots__ = (
        "_clock",
        "_deadline_s",
        "_inference",
        "_is_read",
        "_on_read",
        "_transport",
        "_try_write",
        "_untaken",
        "_write",
        "arrived_s",
        "first_token_s",
        "id",
        "is_ending",
        "metadata",
        "responses",
    )

    def __init__(
        self,
        transport: Call[Any, Any],
        inference: Inference,
        responses: Responses,
        arrived_s: float,
        clock: Clock,
        *,
        try_write: Callable[[bytes], bool],
        write: Callable[[bytes], Awaitable[None]],
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._inference = inference
        self.arrived_s = arrived_s
        self._clock = clock
        self._try_write = try_write
        self._write = write
        self._on_read = on_read
        self._is_read = False
        self._untaken: tuple[Message, bytes] | None = None
        """A message that the transport has not taken yet, and its response."""
        self._deadline_s = inference.asked.deadline_s
        self.responses = responses
        self.id = inference.asked.id
        self.is_ending = False
        """True once the last response is on its way: it can neither be stopped nor followed by another one."""
        self.first_token_s: float | None = None
        """Time of the first token; None: there is none yet."""
        self.metadata: Mapping[str, str] = _metadata(transport.metadata, inference.asked.tenant)

    @property
    def identities(self) -> Sequence[str]:
        """See Call."""
        return self._transport.identities

    @property
    def peer(self) -> str:
        """See Call."""
        return self._transport.peer

    def remaining_s(self) -> float | None:
        """See Call. None before `read`, because the message may have a deadline."""
        if not self._is_read:
            return None
        own_s, left_s = self._deadline_s, self._transport.remaining_s()
        if own_s is None:
            return left_s
        own_s -= self._clock.now_s() - self.arrived_s
        return own_s if left_s is None else min(own_s, left_s)

    async def read(self) -> bytes | None:
        """See Call. Raises MeshError for a message that cannot be translated."""
        self._is_read = True
        self._on_read()
        if self._inference.error is not None:
            raise self._inference.error
        data, self._inference.data = self._inference.data, b""
        return data

    def try_write(self, message: Message) -> bool:
        """See Call. A message without a response counts as taken."""
        response = self._response(message)
        if response is None or self._try_write(response):
            self._untaken = None
            return True
        return False

    async def write(self, message: Message) -> None:
        """See Call."""
        response = self._response(message)
        self._untaken = None
        if response is not None:
            await self._write(response)

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        """See Call. They are parameters of the last response."""
        self.responses.trailers = trailers

    def _response(self, message: Message) -> bytes | None:
        """Return the response for `message`. It is made once, also for a message that the transport did not take."""
        if self._untaken is not None and self._untaken[0] is message:
            return self._untaken[1]
        response = self.responses.take(message)
        if not isinstance(message, BareTokens) and message.HasField("finished"):
            self.is_ending = True
        if self.first_token_s is None and isinstance(message, BareTokens):
            self.first_token_s = self._clock.now_s()
        if response is not None:
            self._untaken = (message, response)
        return response


_OF_RESUMES: Final = frozenset({HANDOVER_METADATA, CONTINUES_METADATA})
"""Metadata of clients that can continue at another frontend. Those of this surface cannot."""


def _metadata(found: Mapping[str, str], tenant: str | None) -> Mapping[str, str]:
    """Return the metadata of an inference."""
    if tenant is None and _OF_RESUMES.isdisjoint(found):
        return found
    made = {key: value for key, value in found.items() if key not in _OF_RESUMES}
    return made if tenant is None else {**made, HEADER: tenant}
