"""One attempt on this replica, from its submit until its handoff is gone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.v1 import attach_pb2 as pb

PRIORITY_CLASS_DEFAULT: Final = 4
"""Of a budget that names none."""


class State(Enum):
    """QUEUED -> RUNNING -> HELD; from each of them a slot may be forgotten.

    QUEUED: waits for the engine; holds nothing. RUNNING: a context_only call is live; blocks are reserved. HELD: the engine
    keeps the blocks until decode has them, somebody gives the handoff up, or its time is over.
    """

    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"


@dataclass(slots=True, eq=False)
class Slot:
    """An attempt. Times are on the replica's clock, in seconds."""

    request_id: str
    attempt: int
    start_position: int
    prompt_tokens: int
    blocks: int
    """KV blocks of the prompt; reserved in RUNNING and HELD."""
    priority: int
    is_shadow: bool
    is_resumed: bool
    estimate_s: float
    """Seconds the prefill is expected to take: by the router, else by what was measured here. 0: unknown, so that nothing
    is refused by it."""
    expected_s: float
    """The same to order the queue by, where a rough guess is better than none. 0: nothing was measured yet."""
    deadline_s: float
    """The earlier of the request's deadline and that of its first token; holds until the first token."""
    submitted_s: float
    traceparent: str
    submit: pb.Submit | None
    """What the engine call is made of; dropped when it was made."""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    tenant: str = ""
    weight: float = 1.0
    """Share of the tenant inside its band."""
    max_output_tokens: int = 0
    end_token_id: int = -1

    vocabulary_size: int = 0
    """The first token is below it. 0: it is not checked."""
    state: State = State.QUEUED
    session: CallerSession[Slot] | None = None
    """The stream that reads this slot. None: the handoff outlives its stream for a moment."""
    number: int = 0
    """The slot's number within `session`."""
    call_id: int = 0
    """The engine call. 0: none is live."""
    called_s: float = 0.0
    context_phase_params: bytes = b""
    """The handoff, once the engine gave it."""
    token_id: int | None = None
    logprob: float | None = None
    reused_blocks: int = 0
    expire_s: float = float("inf")
    """When a held handoff is given up."""

    @property
    def start_by_s(self) -> float:
        """The last moment the engine may get the prompt and still be in time."""
        return self.deadline_s - self.estimate_s

    def is_complete(self) -> bool:
        """True if the first token ends the answer: decode needs no handoff."""
        return self.token_id is not None and (
            self.token_id == self.end_token_id or self.max_output_tokens == 1
        )

    def __repr__(self) -> str:
        where = f"{self.session.peer}/{self.number}" if self.session else "nobody"
        return (
            f"Slot({self.request_id[:8]}/{self.attempt} {self.state.value} at {where}, {self.blocks} blocks)"
        )
