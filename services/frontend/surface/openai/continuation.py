"""An answer that goes on behind the events that the client has (`Last-Event-ID`). Pure.

The request is executed again with its idempotency key and its seed, so its tokens are the same. The first `position` of
them are left out. An `Output` of its own finds the text that was certain with these tokens.
"""

from __future__ import annotations

from typing import Final

from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.output import BareTokens, Output

FIELD: Final = "Last-Event-ID"


class Continuation:
    """See the module. `output` is empty, and has detokenizer and stop strings of the request."""

    def __init__(self, position: int, output: Output) -> None:
        self._position = position
        self._output = output

    def rest_of(self, message: BareTokens) -> BareTokens | None:
        """Return the part of `message` that the client lacks; None: it has all of it."""
        end = message.position + len(message.ids)
        if message.position >= self._position:
            return message
        known = message.ids[: self._position - message.position]
        self._output.feed(known)
        certain = self._output.take()
        had = len(certain.text) if certain is not None else 0
        if end <= self._position:
            return None
        cut = len(known)
        rest = BareTokens()
        rest.text = message.text[had:]
        rest.ids = message.ids[cut:]
        rest.position = self._position
        rest.logprobs = message.logprobs[cut:]
        rest.top_logprobs = message.top_logprobs[cut:]
        return rest

    def has_end(self, message: pb.Finished) -> bool:
        """Return True if the client has the closing event already. Raises MeshError if it cannot have its position."""
        count = message.usage.output_token_count
        if self._position > count + 1:
            raise not_reached(self._position, count)
        return self._position == count + 1


def not_reached(position: int, tokens: int) -> MeshError:
    """Return the refusal of a position behind the end of the answer."""
    return invalid(
        "FIELD_OUT_OF_RANGE", [Violation(FIELD, str(position), f"0 to {tokens + 1}, the end of the answer,")]
    )


def position_of(text: str) -> int:
    """Return the position in the header's value. Raises MeshError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise invalid(
            "FIELD_OUT_OF_RANGE", [Violation(FIELD, repr(text[:40]), "the id of an event, a number,")]
        )
    return int(text)
