"""The bill of an execution: the tokens that its tenant is charged, by its outcome.

Pure. A request that the mesh failed before its first token is free. So is a request that no engine began. A client that
leaves pays for the prompt if the prompt was run, and for the output that `charge` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.frontend.requests import charge
from services.frontend.requests.request import LiveRequest

OURS: Final = frozenset({"UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"})
"""Codes of outcomes that the mesh caused, except SLOW_READER. Without a token such a request is free."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The tokens of one execution, counted from the request's beginning, and whether it counts as a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    is_request_refunded: bool
    is_complete: bool

    @property
    def is_nothing(self) -> bool:
        """True if no token is charged."""
        return not (self.prompt_tokens or self.output_tokens)


NOT_STARTED: Final = Bill(0, 0, 0, is_request_refunded=True, is_complete=False)


def of(request: LiveRequest) -> Bill:
    """Return the bill of a request that has ended for its client."""
    outcome, progress = request.outcome, request.progress
    assert outcome is not None, f"{request} has not ended"
    is_complete = outcome.error is None
    is_slow_reader = outcome.error is not None and outcome.error.reason == "SLOW_READER"
    is_ours = outcome.error is not None and outcome.error.code.name in OURS and not is_slow_reader
    output_tokens = charge.output_tokens(
        progress.reach, is_complete=is_complete, is_slow_reader=is_slow_reader, is_ours=is_ours
    )
    if outcome.error is not None and not output_tokens:
        if is_ours:
            return NOT_STARTED
        if not progress.ids:  # its prompt was not run to the end
            was_started = any(attempt.is_started for attempt in request.attempts)
            return Bill(0, 0, 0, is_request_refunded=not was_started, is_complete=False)
    cached = min(progress.cached_tokens or 0, request.spec.prompt_tokens)
    return Bill(
        request.spec.prompt_tokens, cached, output_tokens, is_request_refunded=False, is_complete=is_complete
    )
