"""One attempt on this replica, from its submit until its log is forgotten. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb


class State(Enum):
    """PENDING -> RUNNING -> ENDED -> FINISHED; from each of them a slot may be forgotten.

    PENDING: KV reserved, waits for its handoff. Dies with its stream.
    RUNNING: the engine generates.
    ENDED: the engine is done and its KV free; tokens wait for credit or for an adopter.
    FINISHED: everything and the finish row were sent; kept for an adopter.
    """

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Slot:
    """An attempt. Times are on the replica's clock, in seconds."""

    request_id: str
    attempt: int
    is_local: bool
    """PHASE_CONTEXT_AND_GENERATION: this engine runs the prompt too."""
    prompt_tokens: int
    max_output_tokens: int
    end_token_id: int
    log: TokenLog
    deadline_s: float
    ttft_deadline_s: float
    """Bounds the first token, until the handoff or the engine's first answer came. Infinite: none."""
    submitted_s: float
    traceparent: str
    blocks: int
    """KV blocks reserved; 0 as soon as the engine is done."""
    submit: pb.Submit | None
    """What the engine call is made of; dropped when it was made."""

    tenant: str = ""
    """Tenant that pays; empty: a mesh without tenants."""
    vocabulary_size: int = 0
    """Ids that the engine may make are below it. 0: ids are not checked."""
    state: State = State.PENDING
    session: CallerSession[Slot] | None = None
    """The stream that reads this slot. None: an orphan, or FINISHED."""
    number: int = 0
    """The slot's number within `session`."""
    handed_tokens: int = 0
    """Tokens at the head of the log that came with the handoff: the caller has them."""
    call_id: int = 0
    """The engine call. 0: none is live."""
    called_s: float = 0.0
    answered_s: float | None = None
    heard_s: float = 0.0
    """When the engine last said something; `called_s` before."""
    reused_blocks: int = 0
    takeover: int = 0
    """Number of the last adoption. 0: there was none, or its caller does not count."""
    has_first_row: bool = False
    """The first token goes out as a row of its own: a local slot, until somebody adopts it."""
    first: pb.FirstToken | None = None
    """That row, while it waits to be sent."""
    ending: pb.Finish.Reason.ValueType = pb.Finish.REASON_UNSPECIFIED
    """Why the engine ended. Set in ENDED and FINISHED."""
    computed_told: int = 0
    """What `session` heard last of how much the engine computed beyond the credit."""
    blocked_s: float | None = None
    """Since when tokens wait for credit."""
    expire_s: float = float("inf")
    """When an orphan is cancelled, or a finished log forgotten."""

    def __repr__(self) -> str:
        where = f"{self.session.peer}/{self.number}" if self.session else "nobody"
        log = self.log
        return (
            f"Slot({self.request_id[:8]}/{self.attempt} {self.state.value} at {where}, "
            f"log {log.start}..{log.sent}..{log.end}, credit {log.credit}, {self.blocks} blocks)"
        )

    def is_detached(self) -> bool:
        """True while no stream reads a slot that has something left to say."""
        return self.session is None and self.state is not State.FINISHED

    def deadline_now_s(self) -> float:
        """Return the deadline that holds at this moment."""
        awaits_first = self.state is State.PENDING or (self.is_local and self.answered_s is None)
        return min(self.deadline_s, self.ttft_deadline_s) if awaits_first else self.deadline_s

    def known_position(self) -> int:
        """Return one past the last position a reader can have."""
        return max(self.log.end, self.log.start + self.handed_tokens)
