"""State machine of one request of a client, from its first send to its end, with failover between frontends.

Pure and synchronous. Inputs are messages, broken calls and unresponsive frontends. Outputs are chunks for the caller and
the next step.

    SENDING ── started ──► STREAMING ── finished ──► DONE
       ▲                      │
       └─ broken, unresponsive ┘   resend: with the resume token and the ids, or, before `started`, with the same key;
                                   without tokens and with its model version gone, anew

INVARIANT: each token is handed out exactly once. The chunks, joined, are the positions up to len(ids) without repeat or
gap, after any failures. They begin at 0, or after the received tokens of the caller's own `options.resume`. Their text is
the text of these ids, and once finished, with the end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvmesh.client.errors import GenerateError, ProtocolBroken, error_of
from kvmesh.client.region_filter import RegionFilter, RegionStep
from kvmesh.client.retries import GiveUp, Retries, Retry, RetryContext
from kvmesh.client.retry_budget import RetryBudget
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb

TOKEN_REFUSED: Final = frozenset({"RESUME_TOKEN_INVALID", "FIELD_UNKNOWN"})
"""Reasons of a frontend that cannot read a resume token: it runs an older release, or lacks the mesh's secret."""


VERSION_GONE: Final = "STALE_SNAPSHOT"
"""Reason of a mesh in which no pool serves the model version of the request any more."""

BEGIN_CHARACTERS: Final = 256
BEGIN_TOKENS: Final = 64
"""Length of the begin of a prompt that stands for a conversation without a session."""

VERSION_GONE_MAX: Final = 4
"""Refusals for the version of a stream with tokens, after which it ends, but not before VERSION_GONE_S."""

VERSION_GONE_S: Final = 3.0
"""Time in which every frontend has taken the newest snapshot, or a region that works has been found again."""

TTFT_MIN_S: Final = 0.001
"""Shortest TTFT timeout that the mesh accepts."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer."""

    ids: tuple[int, ...]
    """Tokens; empty if only text became final."""
    text: str
    """Text that became final with these tokens: complete characters only."""
    position: int
    """Position of the first token in the answer, from 0."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probabilities, parallel to `ids`; empty unless requested."""
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    """Log-probabilities by token id of the most likely tokens, parallel to `ids`; empty unless requested."""


class CallState:
    """See the module. `has_own_key`: the client made the idempotency key, so no other request can supersede this one.

    The request may run from `began_s` to `deadline_s`. `regions`: names of the client's regions. `budget`: the
    client's retry budget; None: the request has one of its own.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        retry_policy: RetryPolicy,
        deadline_s: float,
        *,
        has_own_key: bool,
        began_s: float = 0.0,
        regions: Iterable[str] = ("",),
        budget: RetryBudget | None = None,
    ) -> None:
        self.request = request
        self.session = request.session_id or _begin_of(request)
        """Names the conversation of the request: all its turns have the same one."""
        self.deadline_s = deadline_s
        self.ids: list[int] = list(request.options.resume.received_token_ids)
        self.text = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[Mapping[int, float]] = []
        self.started: pb.Started | None = None
        """The first `started`; its facts hold for all sends of the request, unless another model version begins it anew."""
        self.finished: pb.Finished | None = None
        self.resumes = 0
        """Number of failovers after the first `started`."""
        self._began_s = began_s
        self._ttft_s = _ttft_s(request)
        self._retries = Retries(
            retry_policy,
            deadline_s,
            len(self.ids),
            has_own_key=has_own_key,
            began_s=began_s,
            ttft_s=self._ttft_s,
            budget=budget,
        )
        self._tokens: list[bytes] = (
            [request.options.resume.resume_token] if request.options.HasField("resume") else []
        )
        """Resume tokens, the newest last: a frontend of an older release may not read the newest one."""
        self._heard_started = False
        """True if the current call has sent `started`."""
        self._tail = ""
        """Text after the last id. It is final only if the answer ends here, so it is held until `finished`."""
        self._token_refusals = 0
        """Refusals of the resume token in a row."""
        self._version_refusals = 0
        """Refusals for the model version since the last `started`, of regions that are asked again."""
        self._version_gone_s = 0.0
        """Time of the first of them."""
        self._region_filter = RegionFilter(regions)

    @property
    def sends(self) -> int:
        """Number of sends of the request."""
        return self._retries.sends

    @property
    def barred(self) -> frozenset[str]:
        """Regions in which the request is not sent any more."""
        return self._region_filter.barred

    def is_over(self, now_s: float) -> bool:
        """True if the deadline has passed; before the first token, if the TTFT timeout has passed."""
        return now_s >= self._retries.until_s(len(self.ids))

    def outgoing(self, now_s: float | None = None) -> pb.GenerateRequest:
        """Return the message of the next send, and count the send.

        `now_s`: None means that no time has passed since `began_s`. Check `is_over` first.
        """
        passed_s = 0.0 if now_s is None or not self.sends else now_s - self._began_s
        self._retries.sends += 1
        self._heard_started, self._tail = False, ""
        if not self._tokens and not (passed_s and self._ttft_s is not None):
            return self.request
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        if self._ttft_s is not None and not self.ids:
            left_s = max(TTFT_MIN_S, self._ttft_s - passed_s)
            request.limits.ttft_timeout.FromNanoseconds(round(left_s * 1e9))
        if self._tokens:
            request.options.resume.Clear()
            request.options.resume.resume_token = self._tokens[-1]
            request.options.resume.received_token_ids.extend(self.ids)
        return request

    def on_message(self, message: pb.GenerateResponse) -> Chunk | None:
        """Take a message of the current call; return the new chunk for the caller, if any. Raises ProtocolBroken."""
        if self.finished is not None:
            raise self._broken("a message came after the last one")
        kind = message.WhichOneof("event")
        if kind == "started":
            self._start(message.started)
            return None
        if kind is None:
            return None  # an event of a newer release
        if not self._heard_started:
            raise self._broken(f"{kind} came before started")
        if kind == "tokens":
            return self._take(message.tokens)
        return self._finish(message.finished)

    def on_lost(self, what: str, *, has_other: bool, now_s: float, jitter: float) -> Retry | GiveUp:
        """The call broke without a status of the mesh, or its frontend became unresponsive. `jitter` in [0, 1).

        `has_other`: the next send goes to another frontend, with a closed circuit.
        """
        return self._retries.on_lost(what, RetryContext(len(self.ids), has_other, now_s, jitter))

    def region_step(self, region: str, details: ErrorDetails, works: Callable[[str], bool]) -> RegionStep:
        """Return what a status of a frontend in `region` means for the region of the next send; change `barred` with it.

        Call it before `on_error`. `works`: True for a region with a frontend to try.
        """
        has_older_token = details.reason in TOKEN_REFUSED and len(self._tokens) > 1
        if has_older_token or (details.reason == VERSION_GONE and self._may_begin_anew()):
            return RegionStep.STAY
        return self._region_filter.on_status(region, details, works, has_tokens=bool(self.ids))

    def on_error(
        self,
        details: ErrorDetails,
        *,
        has_other: bool,
        now_s: float,
        jitter: float,
        step: RegionStep = RegionStep.STAY,
    ) -> Retry | GiveUp:
        """The call ended with a status other than OK. `step`: from `region_step`."""
        context = RetryContext(len(self.ids), has_other, now_s, jitter)
        reason = details.reason
        is_gone = reason == VERSION_GONE and bool(self.ids) and step is RegionStep.STAY
        if step is RegionStep.FINAL or (is_gone and self._is_version_over(now_s)):
            return GiveUp(error_of(details))
        if step is RegionStep.MOVE:
            self._token_refusals += reason in TOKEN_REFUSED
            return self._retries.on_refused_by_region(details, context)
        if reason in TOKEN_REFUSED and self._may_be_read_elsewhere(reason, has_other=has_other):
            return self._retries.on_changed_request(details, context)
        if reason == VERSION_GONE and self._may_begin_anew():
            self._tokens, self.started = [], None
            return self._retries.on_changed_request(details, context)
        return self._retries.on_error(details, context)

    def _is_version_over(self, now_s: float) -> bool:
        """Count a refusal for the model version; return True if it is the last one."""
        if not self._version_refusals:
            self._version_gone_s = now_s
        self._version_refusals += 1
        return self._version_refusals >= VERSION_GONE_MAX and now_s - self._version_gone_s >= VERSION_GONE_S

    def on_end(self) -> GiveUp | None:
        """The call ended OK."""
        return (
            None
            if self.finished is not None
            else GiveUp(self._broken("the stream ended with OK before its last message"))
        )

    def deadline_error(self) -> GenerateError:
        """Return the error of a request past its deadline or TTFT timeout."""
        return self.with_output(self._retries.deadline_passed(len(self.ids)))

    def with_output(self, error: GenerateError) -> GenerateError:
        """Return `error` with the tokens, the text and the resume token received so far."""
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
                f"request {first.request_id} continued as {started.request_id}, seed {first.seed} as {started.seed}"
            )
        else:
            self.resumes += 1
        self._heard_started = True
        # Every release reads the first token of a request. A resume's token may name the attempt's location, which an older
        # release cannot read.
        is_resume = bool(self._tokens)
        self._tokens = [*self._tokens[:is_resume], started.resume_token]
        self._token_refusals = self._version_refusals = 0
        self._region_filter.on_started()

    def _take(self, tokens: pb.Tokens) -> Chunk | None:
        if tokens.resume_token:
            self._tokens[1:] = [tokens.resume_token]
        have, ids = len(self.ids), tuple(tokens.ids)
        if not ids:
            self._tail += tokens.text
            return None
        if tokens.position != have:
            raise self._broken(f"position {tokens.position} came after {have} tokens")
        if self._tail:
            raise self._broken(f"tokens came after the end of the text, at position {have}")
        self.ids += ids
        self.text += tokens.text
        logprobs = tuple(tokens.logprobs)
        self.logprobs += logprobs
        top_logprobs = tuple(dict(zip(each.ids, each.logprobs, strict=False)) for each in tokens.top_logprobs)
        self.top_logprobs += top_logprobs
        return Chunk(ids, tokens.text, have, logprobs, top_logprobs)

    def _finish(self, finished: pb.Finished) -> Chunk | None:
        if finished.usage.output_token_count != len(self.ids):
            raise self._broken(
                f"{finished.usage.output_token_count} tokens were sent, {len(self.ids)} arrived"
            )
        self.finished = finished
        tail, self._tail = self._tail, ""
        self.text += tail
        return Chunk((), tail, len(self.ids)) if tail else None

    def _may_be_read_elsewhere(self, reason: str, *, has_other: bool) -> bool:
        """Return whether another send may help after a refused resume token.

        An older token is tried first. A token that is the only one is tried once more, at another frontend. Before
        `started`, that token is the caller's own, and is tried again only after FIELD_UNKNOWN.
        """
        self._token_refusals += 1
        if len(self._tokens) > 1:
            self._tokens.pop()  # the older token has fewer fields
            return True
        is_readable = bool(self._tokens) and (self.started is not None or reason == "FIELD_UNKNOWN")
        return is_readable and has_other and self._token_refusals == 1

    def _may_begin_anew(self) -> bool:
        """Return whether another model version may answer: the caller has no token, and gave no resume token."""
        return self.started is not None and not self.ids and not self.request.options.HasField("resume")

    def _broken(self, what: str) -> ProtocolBroken:
        return ProtocolBroken("PROTOCOL_BROKEN", f"{what}: a bug in the mesh or in this client")


def _begin_of(request: pb.GenerateRequest) -> str:
    """Return the begin of the prompt, which the turns of a conversation share."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text[:BEGIN_CHARACTERS]
        case "tokens":
            return ",".join(map(str, request.tokens.ids[:BEGIN_TOKENS]))
        case "chat":
            return "".join(
                each.SerializeToString(deterministic=True).hex() for each in request.chat.messages[:2]
            )
        case _:
            return ""


def _ttft_s(request: pb.GenerateRequest) -> float | None:
    """Return the TTFT timeout; None if none is given, or if the mesh will refuse it."""
    timeout = request.limits.ttft_timeout
    seconds = timeout.seconds + timeout.nanos / 1e9
    return seconds if request.limits.HasField("ttft_timeout") and seconds >= TTFT_MIN_S else None
