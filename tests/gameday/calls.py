"""One turn of a conversation as its client saw it. Pure, except for reading the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

GOOD, REFUSED, BARE, FAILED, CUT, WRONG = "good", "refused", "bare", "failed", "cut", "wrong"
OUTCOMES: Final = (GOOD, REFUSED, BARE, FAILED, CUT, WRONG)
"""
| outcome | meaning                                                                  |
|---------|--------------------------------------------------------------------------|
| good    | all tokens, all of them right                                            |
| refused | a refusal of the mesh with RetryInfo, before the first token             |
| bare    | a refusal of the mesh without RetryInfo, before the first token          |
| failed  | another error before the first token, for example a lost connection      |
| cut     | an error after the first token: the stream was lost                      |
| wrong   | a wrong token                                                            |
"""

REFUSALS: Final = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""Statuses of a refusal, if the mesh gives a reason with them."""

INFEASIBLE: Final = "INFEASIBLE_DEADLINE"
"""Reason of a refusal with the status DEADLINE_EXCEEDED: the mesh tells in time that too little time is left."""

VERSION_GONE: Final = "STALE_SNAPSHOT"


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One request and its answer. Times are of the machine's monotonic clock."""

    conversation: int
    turn: int
    home: str
    kind: str
    sent_s: float
    ended_s: float
    first_s: float | None
    """Time of the first token."""
    outcome: str
    reason: str
    """Reason of the error; empty: none."""
    version: str
    """Model version that answered; empty: none began to."""
    frontend: str
    """Region of the frontend that ended the answer; empty: unknown."""
    tried: tuple[str, ...]
    """Region of each attempt, as the answer explains them."""
    sends: int
    """Sends of the client."""
    resumes: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Tokens that arrived."""
    sent_tokens: int
    """Tokens of the prompt as the client sent it."""
    expected_tokens: int
    """Tokens of the right answer."""

    @property
    def attempts(self) -> int:
        """Attempts of the request: the last send's, and one for each earlier send."""
        return max(1, len(self.tried)) + max(0, self.sends - 1)

    @property
    def served(self) -> str:
        """Region of the last attempt; of the frontend where no attempt is explained."""
        return self.tried[-1] if self.tried else self.frontend


def cost_of(found: Iterable[Call]) -> tuple[int, int]:
    """Return the least and the most tokens that requests may be charged, prompts and outputs together.

    A good one costs what it has, to the token. Another one costs nothing without a token, or at least what its client saw,
    and at most what it asked for.
    """
    least = most = 0
    for call in found:
        whole = call.sent_tokens + call.expected_tokens
        seen = call.sent_tokens + call.output_tokens if call.output_tokens else 0
        least += whole if call.outcome == GOOD else seen
        most += whole
    return least, most


def outcome_of(
    *, error: str, reason: str, has_retry_after: bool, has_tokens: bool, is_right: bool, is_whole: bool
) -> str:
    """Return the outcome of an answer. `error`: name of the status, empty without an error; `reason`: that of the mesh."""
    if not is_right:
        return WRONG
    if not error and is_whole:
        return GOOD
    if has_tokens:
        return CUT
    if (error in REFUSALS and reason) or reason == INFEASIBLE:
        return REFUSED if has_retry_after else BARE
    return FAILED


def read(path: Path) -> list[Call]:
    """Return the calls of a file, a JSON line each. A line that is cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Call) for line in lines]
