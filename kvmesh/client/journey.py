"""One request of a client from its first send to its end, over as many frontends as it takes.

Pure and synchronous: messages, broken calls and silences go in; chunks for the caller, and what to do next, come out.

    SENDING ── started ──► STREAMING ── finished ──► DONE
       ▲                      │
       └─── broken, silent ───┘   go on: with the resume token and the ids, or, before `started`, with the same key

Invariant: the chunks handed out, put one behind the other, are positions [0, len(ids)) without repeat or gap, and their
text is the text of exactly these ids (and its end, once finished), whatever broke in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.client.errors import (
    DeadlinePassed,
    GenerateError,
    MeshFull,
    MeshUnavailable,
    ProtocolBroken,
    error_of,
)
from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb

SENDS_TOTAL_MAX: Final = 256
"""Sends of one request, however far each brought it: what resume tokens can count."""

SUPERSEDED_MAX: Final = 2
"""Streams in a row that an earlier send of the same journey may end by coming late; more is somebody else who reads."""

REFUSED_S: Final = 30.0
"""A request that has tokens waits this long for a mesh that is full: what runs of it is kept, and places come free."""

LOST: Final = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED"})
"""Statuses that gRPC itself makes when a connection or a server goes away under a call: without a reason of the mesh."""

FRONTENDS_OWN: Final = frozenset({"DRAINING", "LIVE_REQUESTS_FULL"})
"""Reasons that tell of one frontend: another one may be asked at once."""

TOKEN_REFUSED: Final = frozenset({"RESUME_TOKEN_INVALID", "FIELD_UNKNOWN"})
"""What a frontend says that cannot read a resume token: it is of an older release, or has not seen the mesh's secret."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits and how often it tries. Times in seconds.

    The defaults notice a frozen frontend within 3 s and give up a mesh that is away after about 10 s.
    """

    silence_s: float = 1.0
    """A stream that brought nothing for this long: its frontend is asked whether it lives."""
    answer_s: float = 1.5
    """A frontend that does not answer that question within this is lost, and its streams go on elsewhere."""
    sends_max: int = 12
    """Sends in a row that bring no token; then the request fails."""
    refusals_max: int = 4
    """Refusals in a row by a full mesh; then the request fails."""
    retry_after_max_s: float = 30.0
    """A refusal that says to come back later than this fails the request at once; 0: every refusal does."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("silence_s", 0.05), ("answer_s", 0.05), ("backoff_min_s", 0.001)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}: {low:g} s or more is allowed")
        if not self.retry_after_max_s >= 0:
            raise ValueError(f"retry_after_max_s is {self.retry_after_max_s}: 0 s or more is allowed")
        if not self.backoff_max_s >= self.backoff_min_s:
            raise ValueError(
                f"backoff_max_s is {self.backoff_max_s}: {self.backoff_min_s:g} s or more is allowed"
            )
        for name in ("sends_max", "refusals_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: 1 or more is allowed")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer."""

    ids: tuple[int, ...]
    """Tokens; empty if only text became certain."""
    text: str
    """Text that became certain with them: complete characters only."""
    position: int
    """Position of the first token in the answer, from 0."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probabilities, parallel to `ids`; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class Again:
    """Send `Journey.outgoing()` again."""

    after_s: float
    """Wait this long before."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing is left to try."""

    error: GenerateError


class Journey:
    """See the module. `has_own_key`: the idempotency key is this journey's alone, nobody else can supersede it."""

    def __init__(
        self, request: pb.GenerateRequest, patience: Patience, deadline_s: float, *, has_own_key: bool
    ) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.ids: list[int] = list(request.options.resume.received_token_ids)
        self.text = ""
        self.logprobs: list[float] = []
        self.started: pb.Started | None = None
        """The first `started`; its facts hold for the whole journey."""
        self.finished: pb.Finished | None = None
        self.sends = 0
        self.resumes = 0
        """Times the stream went on elsewhere behind a `started`."""
        self._patience = patience
        self._has_own_key = has_own_key
        self._tokens: list[bytes] = (
            [request.options.resume.resume_token] if request.options.HasField("resume") else []
        )
        """Resume tokens, best last: the newest may be too new for an older frontend."""
        self._heard_started = False
        """True if the current call has said `started`."""
        self._tail = ""
        """Text behind the last id: certain only if the answer ends here, so it waits for `finished`."""
        self._streak = 0
        """Sends in a row without a new token."""
        self._refusals = 0
        self._refused_since_s: float | None = None
        """When the first of those refusals came."""
        self._superseded = 0
        """Calls in a row that were superseded, with tokens or without."""
        self._token_refusals = 0
        """Refusals of the resume token in a row."""

    def outgoing(self) -> pb.GenerateRequest:
        """Return the message of the next send, and count it."""
        self.sends += 1
        self._heard_started, self._tail = False, ""
        if not self._tokens:
            return self.request
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.options.resume.Clear()
        request.options.resume.resume_token = self._tokens[-1]
        request.options.resume.received_token_ids.extend(self.ids)
        return request

    def on_message(self, message: pb.GenerateResponse) -> Chunk | None:
        """Take a message of the current call; return what is new for the caller. Raises ProtocolBroken."""
        if self.finished is not None:
            raise self._broken("a message came behind the last one")
        kind = message.WhichOneof("event")
        if kind == "started":
            self._start(message.started)
            return None
        if kind is None:
            return None  # of a newer release
        if not self._heard_started:
            raise self._broken(f"{kind} came before started")
        if kind == "tokens":
            return self._take(message.tokens)
        return self._finish(message.finished)

    def on_lost(self, what: str, *, has_other: bool, now_s: float, jitter: float) -> Again | GiveUp:
        """The call broke without a word of the mesh, or its frontend fell silent. `jitter` in [0, 1).

        `has_other`: a frontend is there that has not just failed.
        """
        self._superseded = 0
        error = MeshUnavailable("FRONTEND_LOST", what, code="UNAVAILABLE")
        return self._again(error, now_s, self._backoff_s(jitter, at_once=has_other or not self._streak))

    def on_error(
        self, details: ErrorDetails, *, has_other: bool, now_s: float, jitter: float
    ) -> Again | GiveUp:
        """The call ended with a status other than OK."""
        code, reason = details.code.name, details.reason
        self._superseded = self._superseded + 1 if reason == "SUPERSEDED" else 0
        if not reason and code in LOST:
            return self.on_lost(details.message, has_other=has_other, now_s=now_s, jitter=jitter)
        if reason in TOKEN_REFUSED and self._may_be_read_elsewhere(reason, has_other=has_other):
            return self._again(error_of(details), now_s, self._backoff_s(jitter, at_once=not self._streak))
        error = error_of(details)
        if reason == "SUPERSEDED" and self._has_own_key and self._superseded <= SUPERSEDED_MAX:
            # Only an earlier send of this journey can have come late; this one, being later still, wins.
            return self._again(error, now_s, self._backoff_s(jitter, at_once=False))
        if isinstance(error, MeshFull) and reason != "SLOW_READER":
            return self._refused(error, details, has_other=has_other, now_s=now_s, jitter=jitter)
        if not isinstance(error, MeshUnavailable) or self._is_too_late(details):
            return GiveUp(error)
        return self._again(error, now_s, self._pause_s(details, now_s, has_other=has_other, jitter=jitter))

    def is_frontends_fault(self, details: ErrorDetails) -> bool:
        """True if a status tells that its frontend is gone or takes nothing now."""
        return details.reason in FRONTENDS_OWN or (not details.reason and details.code.name in LOST)

    def on_end(self) -> GiveUp | None:
        """The call ended OK."""
        return (
            None
            if self.finished is not None
            else GiveUp(self._broken("the stream ended OK without its last message"))
        )

    def deadline_error(self) -> GenerateError:
        """Return the error of a journey whose time is over."""
        return self.carry(
            DeadlinePassed(
                "DEADLINE",
                f"the request did not end in time; {len(self.ids)} tokens came",
                code="DEADLINE_EXCEEDED",
            )
        )

    def carry(self, error: GenerateError) -> GenerateError:
        """Return `error` with what was received."""
        error.ids, error.text = list(self.ids), self.text
        if self._tokens:
            error.resume = pb.Resume(resume_token=self._tokens[-1], received_token_ids=self.ids)
        return error

    def _start(self, started: pb.Started) -> None:
        if self._heard_started:
            raise self._broken("started came twice")
        first = self.started
        if first is None:
            self.started = started
        elif (started.request_id, started.seed) != (first.request_id, first.seed):
            raise self._broken(
                f"request {first.request_id} went on as {started.request_id}, seed {first.seed} as {started.seed}"
            )
        else:
            self.resumes += 1
        self._heard_started = True
        self._tokens = [started.resume_token]
        self._token_refusals = 0

    def _take(self, tokens: pb.Tokens) -> Chunk | None:
        if tokens.resume_token:
            self._tokens[1:] = [tokens.resume_token]
        have, ids = len(self.ids), tuple(tokens.ids)
        if not ids:
            self._tail += tokens.text
            return None
        if tokens.position != have:
            raise self._broken(f"position {tokens.position} came behind {have} tokens")
        if self._tail:
            raise self._broken(f"tokens came behind the end of the text, at position {have}")
        self.ids += ids
        self.text += tokens.text
        self._streak = self._refusals = 0
        self._refused_since_s = None
        logprobs = tuple(tokens.logprobs)
        self.logprobs += logprobs
        return Chunk(ids, tokens.text, have, logprobs)

    def _finish(self, finished: pb.Finished) -> Chunk | None:
        if finished.usage.output_token_count != len(self.ids):
            raise self._broken(f"{finished.usage.output_token_count} tokens were sent, {len(self.ids)} came")
        self.finished = finished
        tail, self._tail = self._tail, ""
        self.text += tail
        return Chunk((), tail, len(self.ids)) if tail else None

    def _may_be_read_elsewhere(self, reason: str, *, has_other: bool) -> bool:
        """Return whether another send may help where the resume token was refused: once, and not the caller's own."""
        self._token_refusals += 1
        if len(self._tokens) > 1:
            self._tokens.pop()  # the older one says less
            return True
        is_readable = bool(self._tokens) and (self.started is not None or reason == "FIELD_UNKNOWN")
        return is_readable and has_other and self._token_refusals == 1

    def _refused(
        self, error: MeshFull, details: ErrorDetails, *, has_other: bool, now_s: float, jitter: float
    ) -> Again | GiveUp:
        """The mesh is full."""
        self._refusals += 1
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        after_s = self._pause_s(details, now_s, has_other=has_other, jitter=jitter)
        if not self.ids:
            is_over = self._refusals >= self._patience.refusals_max or self._is_too_late(details)
            return GiveUp(error) if is_over else self._again(error, now_s, after_s)
        if now_s - self._refused_since_s >= REFUSED_S:
            return GiveUp(error)
        self._streak = min(self._streak, self._patience.sends_max - 2)  # time bounds it
        return self._again(error, now_s, after_s)

    def _is_too_late(self, details: ErrorDetails) -> bool:
        """Return whether the mesh wants a longer pause than the caller has patience for; what has tokens waits for it."""
        max_s, asked_s = self._patience.retry_after_max_s, details.retry_after_s
        if self.ids or details.reason in FRONTENDS_OWN:
            return False
        return max_s == 0 or (asked_s is not None and asked_s > max_s)

    def _pause_s(self, details: ErrorDetails, now_s: float, *, has_other: bool, jitter: float) -> float:
        """Return the wait behind a status of the mesh."""
        is_frontends = details.reason in FRONTENDS_OWN
        if is_frontends and has_other:
            return self._backoff_s(jitter, at_once=True)
        backoff_s = self._backoff_s(jitter, at_once=False)
        if details.retry_after_s is None:
            return backoff_s
        after_s = max(backoff_s, details.retry_after_s * (1 + 0.25 * jitter))
        # What one frontend says of itself is no reason to give up before the deadline: another may be back earlier.
        return backoff_s if is_frontends and now_s + after_s >= self.deadline_s else after_s

    def _again(self, error: GenerateError, now_s: float, after_s: float) -> Again | GiveUp:
        self._streak += 1
        if self._streak >= self._patience.sends_max or self.sends >= SENDS_TOTAL_MAX:
            return GiveUp(error)
        if now_s >= self.deadline_s:
            return GiveUp(self.deadline_error())
        if now_s + after_s >= self.deadline_s:
            return GiveUp(error)
        return Again(after_s)

    def _backoff_s(self, jitter: float, *, at_once: bool) -> float:
        """Return the wait before the next send; the first ones in a row may go at once, later ones never."""
        if at_once and self._streak < 2:
            return 0.0
        patience = self._patience
        backoff_s = min(patience.backoff_max_s, patience.backoff_min_s * float(2 ** min(self._streak, 16)))
        return backoff_s * (0.5 + 0.5 * jitter)

    def _broken(self, what: str) -> ProtocolBroken:
        return ProtocolBroken("PROTOCOL_BROKEN", f"{what}: a bug in the mesh or in this client")
