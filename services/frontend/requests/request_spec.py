"""The specification of an admitted request: fixed at admission, the same for every attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.buckets.limits import Account
from kvmesh.budget.v1 import budget_pb2
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.pools import DEFAULT_POOL
from kvmesh.regions.names import split
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.requests.resume_token import ATTEMPT_STRIDE, ResumeToken
from services.frontend.requests.sampling import Sampling
from services.frontend.requests.takeover import AttemptLocation, located_in

RUNTIME_GRACE_S: Final = 0.25
"""Seconds by which a deadline of the class is later for the hops behind the frontend; each hop takes its margin off.

The frontend itself ends the request, not before its time and not long after. The hops end only a request that the
frontend missed.
"""

AHEAD_EPOCH_MAX: Final = 8
"""Executions of one request, after its first, that go to the head of their priority class."""

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
"""The caller in a mesh without tenants, where calls are not identified."""


@dataclass(frozen=True, slots=True)
class EarlierExecution:
    """An earlier execution of the request without a report, as a later execution learns of it at its begin."""

    owner: str
    """Name of the execution. Empty: it began without a number from Redis, so its reservation has the request's name."""
    inherited: int
    """Output tokens before its first own one; it does not pay for them."""
    is_predecessor: bool
    """True if the successor continues behind its output."""
    given: int = 0
    """Output position below which it is known to have given tokens; 0: no progress report (accounts.progress_reports)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Arrival and deadlines of a request, in seconds of the frontend's clock."""

    arrived_s: float
    deadline_s: float
    """Time at which this frontend ends the request."""
    is_clients_deadline: bool = True
    """False: the deadline is the mesh's own limit, and the tokens generated until then are a good answer."""
    ttft_deadline_s: float | None = None

    @property
    def hops_deadline_s(self) -> float:
        """Deadline of the request at the hops behind the frontend (deadline propagation)."""
        return self.deadline_s if self.is_clients_deadline else self.deadline_s + RUNTIME_GRACE_S

    def left_s(self, now_s: float, *, is_waiting: bool = True) -> float:
        """Return the time left for the first token if the request still waits for one; else for the whole request."""
        until_s = self.deadline_s
        if is_waiting and self.ttft_deadline_s is not None:
            until_s = min(until_s, self.ttft_deadline_s)
        return until_s - now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSpec:
    """One execution of a request: its number, its name, and the output of the executions before it."""

    attempt_base: int = 0
    """Attempts are numbered from attempt_base + 1."""
    is_resumed: bool = False
    """True if the client resumes a broken stream with its resume token."""
    is_fenced: bool = False
    """True if no other execution of the request has this attempt base (fencing)."""
    is_keyed: bool = False
    """True if the request has an idempotency key, so that the client may send it again."""
    owner: str = ""
    """Unique name of this execution; empty if no other execution of the request can exist yet."""
    earlier: tuple[EarlierExecution, ...] = ()
    """Earlier executions of the request without a report of their output."""
    can_move: bool = False
    """True if the client can continue at another frontend."""
    location: AttemptLocation | None = None
    """Location of the broken stream's attempt, which may still run, and which routers of the chosen pool can take over."""
    is_proven: bool = False
    """True if the resume token has the location of an attempt, wherever that ran: an engine made output."""
    received_ids: tuple[int, ...] = ()
    """Output that the client has already; empty unless `is_resumed`."""

    @property
    def epoch(self) -> int:
        """Number of this execution of the request, from 0; executions at other frontends have other numbers."""
        return self.attempt_base // ATTEMPT_STRIDE

    @property
    def is_repeatable(self) -> bool:
        """True if the request may have other executions: the client resumes it, or has a key to send it again."""
        return self.is_resumed or self.is_keyed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request of a client: validated, tokenized, with its seed and its deadlines."""

    caller: Caller = NOBODY
    """The charged caller, with its tenant and service class."""
    reservation_id: str = ""
    """Id of its budget reservation; empty: no reservation."""
    request_id: str
    """32 lower-case hexadecimal digits."""
    prompt_ids: bytes
    """32-bit little-endian; at least one token."""
    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_output_tokens: int
    """Positions of the whole output: [0, max_output_tokens)."""
    asked_output_tokens: int = 0
    """Output tokens that the client asked for; its deadline may leave no time for all. 0: `max_output_tokens`."""
    pool: str = DEFAULT_POOL
    """Pool of the routers and replicas that serve the request, "region/pool" in another region. All attempts stay in it."""
    home: str = ""
    """Home region of the caller. Empty: a mesh without regions."""
    border: str = ""
    """Name of the frontend's region. Empty: a mesh without regions."""
    model_version: str
    rollout: str = ""
    """Id of the rollout whose weights chose the pool. Empty: no rollout, or another reason."""
    end_token_ids: frozenset[int]
    """Ids of the model's tokens that end the output. Empty: none."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids of the client's tokens that end the output."""
    priority: int = 0
    session_id: str = ""
    timing: Timing
    execution: ExecutionSpec = field(default_factory=ExecutionSpec)
    logprobs: bool = False
    explain: bool = False
    traceparent: str = ""
    digest: int = 0
    """Digest for the resume token; see validation.digest."""
    moves: int = 0
    """Moves of earlier executions of the same call, which a new reading goes on with."""
    left_regions: frozenset[str] = frozenset()
    """Regions that those executions left. Empty name: the own one."""
    is_shadow: bool = False
    """True for a copy of a user's request. No user sees its answer."""

    @property
    def region(self) -> str:
        """Region that serves the request. Empty: the frontend's own one."""
        return split(self.pool)[0]

    @property
    def is_guest(self) -> bool:
        """True if the region that serves the request is not the caller's home."""
        return self.home != (self.region or self.border)

    @property
    def is_output_clamped(self) -> bool:
        """True if the output limit is below the one asked for, because the client's deadline leaves no time for more."""
        return self.max_output_tokens < self.asked_output_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) // 4

    @property
    def goes_ahead(self) -> bool:
        """True if an engine had the request. Then no limit refuses it, and it waits at the head of its priority class.

        Received tokens prove nothing, because a client may make them up. A resume token with a location proves that output
        was made there. It counts for AHEAD_EPOCH_MAX executions, so that it is no way around the limits. A mesh without
        tenants has no limits; there received tokens are enough.
        """
        execution = self.execution
        if not execution.received_ids or not self.caller.tenant.name:
            return bool(execution.received_ids)
        is_proven = execution.is_proven or execution.location is not None
        return is_proven and execution.epoch <= AHEAD_EPOCH_MAX

    @property
    def rid(self) -> str:
        """Unique name of the reservation, which a later execution can derive.

        A request without key or token gets no number from Redis. Its id was drawn for this execution alone.
        """
        return self.execution.owner if self.execution.is_repeatable else self.request_id

    @property
    def affinity(self) -> str:
        """Key of session affinity: related requests go to one router."""
        return self.session_id or self.request_id

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
        """Return the submit of `attempt`, which continues behind the `received` tokens.

        The remaining times of its budget are set when the submit is written.
        """
        ends = sorted(self.end_token_ids | self.stop_token_ids)
        token_ids = self.prompt_ids + frames.pack_ids(received)
        submit = pb.Submit(
            slot=slot,
            request_id=self.request_id,
            attempt=attempt,
            start_position=len(received),
            token_ids=token_ids,
            block_hashes=blocks.pack(blocks.chain(token_ids, block_tokens, self.model_version)),
            block_tokens=block_tokens,
            sampling=self.sampling.message(),
            phase=pb.PHASE_UNSPECIFIED,
            credit_position=credit_position,
            model_version=self.model_version,
            session_id=self.session_id,
            traceparent=self.traceparent,
            logprobs=self.logprobs,
            explain=self.explain,
            end_token_id=ends[0] if ends else -1,
            further_end_token_ids=ends[1:],
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
        budget.region = self.home
        if self.is_guest and budget.band:
            budget.band -= 1  # own callers of the class go first; class 0 is the lowest
        budget.sheddable = service_class.is_sheddable
        budget.kv_head_room_permille = round(service_class.kv_headroom * 1000)
        if self.is_shadow:
            budget.shadow, budget.purpose = True, budget_pb2.PURPOSE_SHADOW
        return submit

    def resume_token(self, location: AttemptLocation | None = None, issued_s: int = 0) -> ResumeToken:
        """Return the data that another frontend needs to continue; with `location`, to take over the running attempt.

        `issued_s`: seconds since 1970, used with a location only. Between regions the location has the name of its region.
        """
        if location is not None and self.border:
            location = located_in(location, self.region or self.border)
        token = ResumeToken(
            self.request_id,
            self.sampling.seed,
            self.execution.attempt_base,
            self.digest,
            self.model_version,
            location,
            pool=split(self.pool)[1],
        )
        if location is None:
            return token
        return replace(
            token,
            asked_output_tokens=self.asked_output_tokens or self.max_output_tokens,
            max_output_tokens=self.max_output_tokens,
            issued_s=issued_s,
        )
