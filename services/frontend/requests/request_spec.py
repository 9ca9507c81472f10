"""What a live request shall produce: fixed when it is admitted, the same for every attempt.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.buckets.limits import Account
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.requests.resume_token import ATTEMPT_STRIDE, ResumeToken
from services.frontend.requests.takeover import AttemptLocation

RUNTIME_GRACE_S: Final = 0.25
"""What a class's end is later for the hops behind, each of which takes its margin off: the frontend ends the request
itself, neither before its time nor long after, and they only catch what it missed."""

AHEAD_EPOCH_MAX: Final = 8
"""Executions of one request, after its first, that go ahead of others."""

NOBODY: Final = Caller(
    tenant=Tenant(name=""),
    service_class=ServiceClass(
        name="",
        runtime_max_s=RUNTIME_MAX_S,
        default_deadline_s=RUNTIME_MAX_S,
        max_output_tokens=1 << 20,
    ),
    account=Account("", ()),
)
"""Who calls where nobody asked."""


@dataclass(frozen=True, slots=True)
class EarlierExecution:
    """An execution of the request that has not reported, as the one that begins after it hears of it."""

    owner: str
    """Empty: nobody asked for its number, so its reservation has the name of the request."""
    inherited: int
    """Output that it began behind, and so does not pay."""
    is_predecessor: bool
    """True if it gave the output that the one after it goes on behind."""
    given: int = 0
    """Output below this position is known to have been given by it; 0: it told nothing (accounts.progress_reports)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request of a client, validated, tokenized, with its seed and its deadlines."""

    caller: Caller = NOBODY
    """Who pays, and by which rules."""
    reservation_id: str = ""
    """What its budget was reserved under; empty: nothing was."""
    request_id: str
    """32 lower-case hexadecimal digits."""
    prompt_ids: bytes
    """32-bit little-endian; at least one token."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...] = ()
    max_output_tokens: int
    """Positions of the whole output: [0, max_output_tokens)."""
    asked_output_tokens: int = 0
    """What the client asked for, of which the deadline may leave no time for all; 0: as many as it has."""
    model_version: str
    end_token_id: int
    priority: int = 0
    session_id: str = ""
    arrived_s: float
    deadline_s: float
    """When this frontend ends the request."""
    is_clients_deadline: bool = True
    """False: the mesh's own limit; what was generated until then is a good answer."""
    ttft_deadline_s: float | None = None
    attempt_base: int = 0
    """Attempts are numbered from attempt_base + 1."""
    is_resumed: bool = False
    """True if the client brought it from a broken stream."""
    is_fenced: bool = False
    """True if no other execution of the request has this attempt base."""
    is_keyed: bool = False
    """True if the client named the request, so that it may send it again."""
    owner: str = ""
    """Name of this execution, different from all others; empty if nobody else can have one of the request yet."""
    earlier: tuple[EarlierExecution, ...] = ()
    """Executions of the request that have not told what they gave."""
    can_move: bool = False
    """True if the client can go on at another frontend."""
    location: AttemptLocation | None = None
    """Where the broken stream's attempt ran; perhaps it still does."""
    received_ids: tuple[int, ...] = ()
    """Output the client has already: empty unless `is_resumed`."""
    logprobs: bool = False
    explain: bool = False
    traceparent: str = ""
    digest: int = 0
    """For the resume token; see validation.digest."""

    @property
    def is_output_clamped(self) -> bool:
        """True if it may have less than asked for, because the client's deadline leaves no time for more."""
        return self.max_output_tokens < self.asked_output_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4

    @property
    def epoch(self) -> int:
        """Number of this execution of the request, from 0; those of other frontends have others."""
        return self.attempt_base // ATTEMPT_STRIDE

    @property
    def goes_ahead(self) -> bool:
        """True if an engine had the request: no limit refuses it, and it waits at the head of its band.

        Received tokens prove nothing, for a client may make them up. What came with output does: the token that says where
        it was made. Not for ever, lest that token be a way around the limits. A mesh without tenants has no limits.
        """
        if not self.received_ids or not self.caller.tenant.name:
            return bool(self.received_ids)
        return self.location is not None and self.epoch <= AHEAD_EPOCH_MAX

    @property
    def rid(self) -> str:
        """Name for its reservation, different from all others; one that the execution after this one can know.

        Nobody asks for the number of a request without key or token, and its id was drawn for it alone.
        """
        return self.owner if self.is_resumed or self.is_keyed else self.request_id

    @property
    def affinity(self) -> str:
        """What keeps related requests at one router."""
        return self.session_id or self.request_id

    def left_s(self, now_s: float, *, is_waiting: bool = True) -> float:
        """Return the time until the first token must be there, if the request still waits for it; else until its end."""
        until_s = self.deadline_s
        if is_waiting and self.ttft_deadline_s is not None:
            until_s = min(until_s, self.ttft_deadline_s)
        return until_s - now_s

    @property
    def hops_deadline_s(self) -> float:
        """When the hops behind end it."""
        return self.deadline_s if self.is_clients_deadline else self.deadline_s + RUNTIME_GRACE_S

    def submission(
        self,
        slot: int,
        attempt: int,
        attempts_max: int,
        received: Sequence[int],
        *,
        block_tokens: int,
        credit_position: int,
        resumed: bool,
        vocabulary_size: int = 0,
        contested_replicas: Sequence[str] = (),
    ) -> pb.Submit:
        """Return the submit of `attempt`, which goes on behind the `received` tokens.

        The remaining times of its budget are filled in when it is written.
        """
        token_ids = self.prompt_ids + frames.pack_ids(received)
        submit = pb.Submit(
            slot=slot,
            request_id=self.request_id,
            attempt=attempt,
            start_position=len(received),
            token_ids=token_ids,
            block_hashes=blocks.pack(blocks.chain(token_ids, block_tokens, self.model_version)),
            block_tokens=block_tokens,
            sampling=pb.Sampling(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
            ),
            phase=pb.PHASE_UNSPECIFIED,
            credit_position=credit_position,
            model_version=self.model_version,
            session_id=self.session_id,
            traceparent=self.traceparent,
            logprobs=self.logprobs,
            explain=self.explain,
            end_token_id=self.end_token_id,
            resumed=resumed,
            vocabulary_size=vocabulary_size,
            contested_replicas=contested_replicas,
        )
        budget = submit.budget
        budget.max_output_tokens = self.max_output_tokens - len(received)
        budget.priority = self.priority
        budget.attempt = attempt
        budget.attempts_max = attempts_max
        budget.reservation_id = self.reservation_id
        tenant, service_class = self.caller.tenant, self.caller.service_class
        budget.tenant, budget.weight = tenant.name, tenant.weight
        budget.service_class, budget.band = service_class.name, service_class.priority_class
        budget.sheddable = service_class.is_sheddable
        budget.kv_head_room_permille = round(service_class.kv_headroom * 1000)
        return submit

    def resume_token(self, location: AttemptLocation | None = None, issued_s: int = 0) -> ResumeToken:
        """Return what another frontend needs to go on; with `location`, it takes over what runs there.

        `issued_s`: seconds since 1970, told with a place only.
        """
        token = ResumeToken(
            self.request_id, self.seed, self.attempt_base, self.digest, self.model_version, location
        )
        if location is None:
            return token
        return replace(
            token,
            asked_output_tokens=self.asked_output_tokens or self.max_output_tokens,
            max_output_tokens=self.max_output_tokens,
            issued_s=issued_s,
        )
