"""The token messages of one request, as they are handed to its client: resume tokens, positions, progress.

Synchronous. It implements Source of the turn writer; the serving task uses the same operations.
"""

from __future__ import annotations

from typing import TypeAlias

from kvmesh.clock import wall_s
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.accounts.accounting import Accounting, Hold
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.output import BareTokens
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.takeover import AttemptLocation
from services.frontend.surface.messages import Messages
from services.frontend.surface.slow_reader import SlowReaderTimeout

Message: TypeAlias = pb.GenerateResponse | BareTokens
"""A message of an answer. Surfaces without protobuf get output as BareTokens."""


class Answer:
    """See the module. `take` and `delivered` alternate."""

    __slots__ = (
        "_accounting",
        "_core",
        "_hold",
        "_is_bare",
        "_messages",
        "_position",
        "_progress_at",
        "_reader",
        "_request",
        "_told",
    )

    def __init__(
        self,
        request: LiveRequest,
        reader: SlowReaderTimeout,
        hold: Hold,
        core: FrontendCore,
        accounting: Accounting,
        messages: Messages,
        *,
        is_bare: bool = False,
    ) -> None:
        """`is_bare`: output is taken as BareTokens, without resume tokens."""
        self._request = request
        self._reader = reader
        self._hold = hold
        self._core = core
        self._accounting = accounting
        self._messages = messages
        self._is_bare = is_bare
        self._progress_at = hold.progress_at
        self._position = 0
        """End of the output in the last message that was taken."""
        self._told: AttemptLocation | None = None
        """Location of the attempt in the client's newest resume token."""

    def on_ready(self) -> None:
        """See Source."""
        self._reader.on_ready()

    def has_ended(self) -> bool:
        """See Source."""
        return self._request.outcome is not None

    def take(self) -> Message | None:
        """See Source. The message has a new resume token if the attempt's location is not the one that the client has."""
        request = self._request
        if self._is_bare:
            bare = BareTokens()
            if not request.output.take_into(bare):
                return None
            self._position = request.output.taken
            return bare
        message = pb.GenerateResponse()
        tokens = message.tokens
        if not request.output.take_into(tokens):
            return None
        self._position = request.output.taken
        location = request.location
        if location is not None and location != self._told:
            tokens.resume_token = self._messages.newer_token(request.spec, location, wall_s())
            self._told = location
        return message

    def delivered(self, now_s: float) -> None:
        """See Source."""
        self._reader.wrote_s = now_s
        self._core.deliver(self._request, self._position, now_s)
        if self._position >= self._progress_at:
            self._progress_at = self._accounting.progress(self._hold, self._position)
