"""One attempt on this replica, from its submit until its handoff is released. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.v1 import attach_pb2 as pb

PRIORITY_CLASS_DEFAULT: Final = 4
"""The class of a budget that names none."""


class PrefillState(Enum):
    """State machine of a slot: QUEUED -> RUNNING -> HELD, of a seed PENDING -> RUNNING; it may be dropped in any state.

    QUEUED: waits for the engine; reserves nothing. PENDING: a seed that waits for its handoff and then for the engine; KV
    blocks are reserved. RUNNING: a context_only call, or the call of a seed, runs; KV blocks are reserved.
    HELD: the engine holds the KV blocks until decode has pulled them, the handoff is released, or its time is over.
    """

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class PrefillSubmission:
    """The attempt as it was submitted. Times are on the replica's clock, in seconds."""

    request_id: str
    attempt: int
    start_position: int
    prompt_tokens: int
    blocks: int
    """KV blocks of the prompt; reserved in PENDING, RUNNING and HELD."""
    priority: int
    is_shadow: bool
    is_resumed: bool
    estimate_s: float
    """Expected seconds of the prefill: the router's estimate, else the rate measured here. 0: unknown, refuses nothing."""
    expected_s: float
    """Expected seconds for the queue order, where a rough guess is better than none. 0: nothing was measured yet."""
    deadline_s: float
    """The earlier of the request's deadline and that of its first token; holds until the first token."""
    submitted_s: float
    traceparent: str
    priority_class: int = PRIORITY_CLASS_DEFAULT
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant within its priority class."""
    max_output_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    vocabulary_size: int = 0
    """The id of the first token must be below it. 0: the id is not checked."""
    purpose: str = ""
    """"warm_up" or "probe" for a call of the control plane; empty for every other call."""
    is_seed: bool = False
    """PHASE_SEED: pulls the KV blocks of a handoff and computes nothing."""
    is_guided: bool = False
    """The output may end at the end of its guide, without an end token."""

    @property
    def start_by_s(self) -> float:
        """Latest start of the engine call that still meets the deadline."""
        return self.deadline_s - self.estimate_s


@dataclass(slots=True, eq=False)
class PrefillSlot:
    """An attempt and its state."""

    submitted: PrefillSubmission
    submit: pb.Submit | None
    """Input of the engine call; dropped when the call is made."""
    state: PrefillState = PrefillState.QUEUED
    session: CallerSession[PrefillSlot] | None = None
    """The stream that reads this slot. None: a held handoff without a stream."""
    number: int = 0
    """The slot's number within `session`."""
    call_id: int = 0
    """The running engine call. 0: none."""
    called_s: float = 0.0
    handoff: pb.Handoff | None = None
    """The handoff of a seed, from its arrival until the engine call."""
    context_phase_params: bytes = b""
    """The engine's handoff; empty before the call ends."""
    token_id: int | None = None
    logprob: float | None = None
    alternatives: bytes = b""
    reused_blocks: int = 0
    expire_s: float = float("inf")
    """Time at which a held handoff is released."""

    def is_complete(self) -> bool:
        """True if the first token ends the answer, so that decode needs no handoff."""
        return self.token_id is not None and (
            self.token_id in self.submitted.end_token_ids or self.submitted.max_output_tokens == 1
        )

    def is_waiting_control(self) -> bool:
        """True for a slot of the control plane without an engine call before it."""
        return bool(self.submitted.purpose) and self.state in (PrefillState.QUEUED, PrefillState.PENDING)

    def __repr__(self) -> str:
        where = f"{self.session.peer}/{self.number}" if self.session else "no stream"
        name, state = f"{self.submitted.request_id[:8]}/{self.submitted.attempt}", self.state.value
        return f"Slot({name} {state} at {where}, {self.submitted.blocks} blocks)"
