"""One attempt on this replica, from its submit until its log is dropped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb


class DecodeState(Enum):
    """State machine of a slot: PENDING -> RUNNING -> ENDED -> FINISHED, and FINISHED -> ENDED at a takeover.

    A slot may be dropped in any state. A local slot of the control plane begins with QUEUED -> RUNNING. No slot of the
    control plane is FINISHED: its log is dropped at its end.

    QUEUED: a slot of the control plane waits for its turn in the lane; it reserves nothing.
    PENDING: KV blocks are reserved, and the slot waits for its handoff. A slot with a local prefill leaves this state
    at once. A slot of the control plane also waits for its turn. If the caller's stream breaks now, the slot is dropped.
    RUNNING: the engine generates.
    ENDED: the engine is done and its KV blocks are free; tokens wait for the flow-control window or for a takeover.
    FINISHED: all tokens and the finish row were sent; the log is kept for a takeover.
    """

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class DecodeSubmission:
    """The attempt as it was submitted. Times are on the replica's clock, in seconds."""

    request_id: str
    attempt: int
    is_local: bool
    """PHASE_CONTEXT_AND_GENERATION: this engine computes the prompt too (local prefill)."""
    prompt_tokens: int
    max_output_tokens: int
    deadline_s: float
    ttft_deadline_s: float
    """Deadline of the first token; holds until the handoff or the engine's first answer. Infinite: none."""
    submitted_s: float
    traceparent: str
    tenant: str = ""
    """The charged tenant; empty: a mesh without tenants."""
    vocabulary_size: int = 0
    """Output ids must be below it. 0: ids are not checked."""
    purpose: str = ""
    """"warm_up" or "probe" for a call of the control plane; empty for every other call."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end the output. The first one stands for an end token that the engine omits."""
    is_guided: bool = False
    """The output may end at the end of its guide, without an end token."""


@dataclass(slots=True, eq=False)
class DecodeSlot:
    """An attempt and its state."""

    submitted: DecodeSubmission
    log: TokenLog
    blocks: int
    """Reserved KV blocks; 0 in QUEUED, and once the engine is done."""
    submit: pb.Submit | None
    """Input of the engine call; dropped when the call is made."""

    state: DecodeState = DecodeState.PENDING
    session: CallerSession[DecodeSlot] | None = None
    """The stream that reads this slot. None: detached, or FINISHED."""
    number: int = 0
    """The slot's number within `session`."""
    handoff: pb.Handoff | None = None
    """The handoff of a slot of the control plane that waits for its turn."""
    handed_tokens: int = 0
    """Tokens at the head of the log that came with the handoff; the caller has them."""
    call_id: int = 0
    """The running engine call. 0: none."""
    called_s: float = 0.0
    answered_s: float | None = None
    heard_s: float = 0.0
    """Time of the engine's last answer; `called_s` before the first."""
    reused_blocks: int = 0
    takeover: int = 0
    """Number of the last takeover (`Adopt.adoption`). 0: no takeover, or a caller that does not count them."""
    has_first_row: bool = False
    """True while the first token goes out as a row of its own: a local slot before any takeover."""
    first: pb.FirstToken | None = None
    """The first-token row, while it waits to be sent."""
    ending: pb.Finish.Reason.ValueType = pb.Finish.REASON_UNSPECIFIED
    """The engine's finish reason. Set in ENDED and FINISHED."""
    computed_told: int = 0
    """Position last reported to `session` as computed beyond the flow-control window."""
    blocked_s: float | None = None
    """Since this time tokens wait for the flow-control window. None: no backpressure."""
    expire_s: float = float("inf")
    """Time at which a detached slot is cancelled, or a finished log dropped."""

    def __repr__(self) -> str:
        where = f"{self.session.peer}/{self.number}" if self.session else "no stream"
        log = self.log
        return (
            f"Slot({self.submitted.request_id[:8]}/{self.submitted.attempt} {self.state.value} at {where}, "
            f"log {log.start}..{log.sent}..{log.end}, credit {log.credit}, {self.blocks} blocks)"
        )

    def is_waiting(self) -> bool:
        """True before the engine call."""
        return self.state in (DecodeState.QUEUED, DecodeState.PENDING)

    def is_detached(self) -> bool:
        """True while no stream reads an unfinished slot."""
        return self.session is None and self.state is not DecodeState.FINISHED

    def deadline_now_s(self) -> float:
        """Return the deadline that applies in the present state."""
        awaits_first = self.is_waiting() or (self.submitted.is_local and self.answered_s is None)
        return (
            min(self.submitted.deadline_s, self.submitted.ttft_deadline_s)
            if awaits_first
            else self.submitted.deadline_s
        )

    def known_position(self) -> int:
        """Return one past the last position that a reader can have."""
        return max(self.log.end, self.log.start + self.handed_tokens)
