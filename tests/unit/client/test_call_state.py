"""The call state of a request over frontends that die, freeze, refuse and repeat, under random schedules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import grpc
import pytest

from kvmesh.client.call_state import VERSION_GONE_MAX, VERSION_GONE_S, CallState, Chunk
from kvmesh.client.errors import (
    DeadlinePassed,
    GenerateError,
    MeshFault,
    MeshFull,
    MeshUnavailable,
    ProtocolBroken,
    RequestRefused,
    Superseded,
    error_of,
)
from kvmesh.client.region_filter import RegionStep
from kvmesh.client.retries import FULL_WAIT_S, GiveUp, Retry
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.detokenizer import ByteDetokenizer
from services.frontend.requests.output import Output

TEXT = "Łódź — 東京 and 🦊🦊, twice: naïve façade, ½ of the rest."
BYTES = TEXT.encode()
TABLE = [bytes([each]) for each in range(256)]
"""Every byte is a token, so that nearly every cut falls inside a character."""


def details(
    code: str, reason: str = "", retry_after_s: float | None = None, metadata: dict[str, str] | None = None
) -> ErrorDetails:
    """Return the details of a frontend's status."""
    return ErrorDetails(grpc.StatusCode[code], "why", reason, metadata or {}, retry_after_s, {})


def request() -> pb.GenerateRequest:
    """Return a request with a key."""
    return pb.GenerateRequest(text="x", idempotency_key="k")


class Frontend:
    """The messages that any frontend of the mesh sends for a request, as the real frontend makes them."""

    def __init__(self, ids: list[int], stop: tuple[str, ...], draw: random.Random) -> None:
        self.ids, self.stop, self.draw = ids, stop, draw
        self.executions = 0

    def answer(self, message: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """Yield the answer to `message`."""
        self.executions += 1
        output = Output(ByteDetokenizer(TABLE), self.stop, with_logprobs=False)
        received = list(message.options.resume.received_token_ids)
        assert received == self.ids[: len(received)], "the client has tokens that no frontend made"
        token = b"token %d" % self.executions
        yield pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=token))
        at = output.feed(received)
        output.forget_waiting()
        while at < len(self.ids) and output.stop_string is None:
            size = self.draw.randint(1, 4)
            at += output.feed(self.ids[at : at + size])
            if self.draw.random() < 0.7 and (tokens := output.take()) is not None:
                if self.draw.random() < 0.2:
                    tokens.resume_token = token + b", placed"
                yield pb.GenerateResponse(tokens=tokens)
        if output.stop_string is None:
            output.flush()
        while (tokens := output.take()) is not None:
            yield pb.GenerateResponse(tokens=tokens)
        yield pb.GenerateResponse(
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(output_token_count=output.end)
            )
        )


def undisturbed(ids: list[int], stop: tuple[str, ...]) -> tuple[list[int], str]:
    """Return ids and text of an undisturbed answer."""
    found, text = list[int](), ""
    for message in Frontend(ids, stop, random.Random(0)).answer(request()):
        found += message.tokens.ids
        text += message.tokens.text
    return found, text


@pytest.mark.parametrize("seed", range(300))
def test_the_answer_is_exact_after_any_failures(seed: int) -> None:
    """Frontends die after any message, refuse and forget tokens. Ids and text are those of an undisturbed stream."""
    draw = random.Random(seed)
    start = draw.randrange(len(BYTES))
    ids = list(BYTES[start : start + draw.randint(1, 60)])
    stop = draw.choice(((), (), ("twice",), ("🦊",), ("ż", "rest")))
    expected, expected_text = undisturbed(ids, stop)
    frontend = Frontend(ids, stop, draw)
    call_state = CallState(request(), RetryPolicy(sends_max=500, refusals_max=100), 1e6, has_own_key=True)
    chunks: list[Chunk] = []
    now_s, bounded = 0.0, set[str]()
    while call_state.finished is None:
        message = call_state.outgoing()
        step: Retry | GiveUp | None = None
        if draw.random() < 0.3:
            fault = draw.choice(
                ("UNAVAILABLE", "DRAINING", "QUEUE_FULL", "SUPERSEDED", "RESUME_TOKEN_INVALID", "silent")
            )
            code = {
                "QUEUE_FULL": "RESOURCE_EXHAUSTED",
                "SUPERSEDED": "ABORTED",
                "RESUME_TOKEN_INVALID": "INVALID_ARGUMENT",
            }.get(fault, "UNAVAILABLE")
            if fault == "silent":
                step = call_state.on_lost("silent", has_other=True, now_s=now_s, jitter=draw.random())
            elif fault in bounded or (
                fault == "RESUME_TOKEN_INVALID" and not message.options.HasField("resume")
            ):
                continue
            else:
                bounded |= {fault} & {"SUPERSEDED", "RESUME_TOKEN_INVALID"}
                reason = "" if fault == "UNAVAILABLE" else fault
                step = call_state.on_error(
                    details(code, reason, draw.choice((None, 0.5))),
                    has_other=True,
                    now_s=now_s,
                    jitter=draw.random(),
                )
        else:
            lives = draw.choice((1000, draw.randint(0, 8)))
            bounded -= {"SUPERSEDED", "RESUME_TOKEN_INVALID"} if lives else {"SUPERSEDED"}
            for count, answer in enumerate(frontend.answer(message)):
                if count == lives:
                    step = call_state.on_lost(
                        "cut", has_other=draw.random() < 0.5, now_s=now_s, jitter=draw.random()
                    )
                    break
                chunk = call_state.on_message(answer)
                if chunk is not None:
                    chunks.append(chunk)
            else:
                step = call_state.on_end()
        if step is not None:
            assert isinstance(step, Retry), step
            assert 0 <= step.after_s <= 2.5
            now_s += step.after_s
    assert [each for chunk in chunks for each in chunk.ids] == call_state.ids == expected
    assert "".join(chunk.text for chunk in chunks) == call_state.text == expected_text
    assert all(
        chunk.position == sum(len(each.ids) for each in chunks[:at]) for at, chunk in enumerate(chunks)
    )


def started(call_state: CallState) -> CallState:
    """Let the first call send `started` and two tokens."""
    call_state.outgoing()
    call_state.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"1")))
    call_state.on_message(pb.GenerateResponse(tokens=pb.Tokens(ids=[1, 2], text="ab", position=0)))
    return call_state


def call_state(*, deadline_s: float = 100.0, has_own_key: bool = True) -> CallState:
    """Return a call state with the default retry policy."""
    return CallState(request(), RetryPolicy(), deadline_s, has_own_key=has_own_key)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateResponse(tokens=pb.Tokens(ids=[2], text="b", position=1)),
        pb.GenerateResponse(tokens=pb.Tokens(ids=[4], text="d", position=3)),
        pb.GenerateResponse(started=pb.Started(request_id="r", seed=7)),
        pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(output_token_count=3))),
    ],
    ids=["a repeat", "a gap", "a second start", "a token too few"],
)
def test_an_impossible_message_is_reported_as_a_bug(message: pb.GenerateResponse) -> None:
    """The client hides no repeat and no gap."""
    with pytest.raises(ProtocolBroken):
        started(call_state()).on_message(message)


def test_a_stream_that_continues_as_another_request_is_a_bug() -> None:
    """A resumed stream keeps its identity and its seed."""
    one = started(call_state())
    one.outgoing()
    with pytest.raises(ProtocolBroken):
        one.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=8)))


def test_before_started_the_same_request_is_sent_again() -> None:
    """Without a token the idempotency key alone identifies the request."""
    one = call_state()
    first = one.outgoing()
    assert isinstance(one.on_lost("gone", has_other=True, now_s=0, jitter=0), Retry)
    second = one.outgoing()
    assert second == first and second.idempotency_key == "k" and not second.options.HasField("resume")


def test_an_older_frontend_gets_the_older_token() -> None:
    """A token that names the execution's place is too new for an older release; the token of `started` is not."""
    one = started(call_state())
    one.on_message(pb.GenerateResponse(tokens=pb.Tokens(ids=[3], position=2, resume_token=b"1 placed")))
    assert isinstance(one.on_lost("gone", has_other=True, now_s=0, jitter=0), Retry)
    assert one.outgoing().options.resume == pb.Resume(resume_token=b"1 placed", received_token_ids=[1, 2, 3])
    refused = details("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    assert isinstance(one.on_error(refused, has_other=False, now_s=0, jitter=0), Retry)
    assert one.outgoing().options.resume == pb.Resume(resume_token=b"1", received_token_ids=[1, 2, 3])
    last = one.on_error(refused, has_other=False, now_s=0, jitter=0)
    assert isinstance(last, GiveUp) and isinstance(last.error, RequestRefused)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (details("INVALID_ARGUMENT", "FIELD_OUT_OF_RANGE"), RequestRefused),
        (details("ALREADY_EXISTS", "ALREADY_FINISHED"), RequestRefused),
        (details("DEADLINE_EXCEEDED", "TTFT_TIMEOUT"), DeadlinePassed),
        (details("RESOURCE_EXHAUSTED", "SLOW_READER"), MeshFull),
        (details("INTERNAL", "ENGINE_ERROR"), MeshFault),
    ],
    ids=lambda each: getattr(each, "reason", ""),
)
def test_an_error_that_no_retry_mends_is_raised_at_once(
    status: ErrorDetails, kind: type[GenerateError]
) -> None:
    """The error has reason, status and everything received."""
    one = started(call_state())
    step = one.on_error(status, has_other=True, now_s=0, jitter=0)
    assert isinstance(step, GiveUp) and type(step.error) is kind
    error = one.with_output(step.error)
    assert (error.reason, error.code, error.ids, error.text) == (
        status.reason,
        status.code.name,
        [1, 2],
        "ab",
    )
    assert error.resume == pb.Resume(resume_token=b"1", received_token_ids=[1, 2])


def test_a_request_without_tokens_begins_anew_when_its_version_is_gone() -> None:
    """STALE_SNAPSHOT before the first token: the same request is sent at once, and may be answered by another version."""
    one = call_state()
    one.outgoing()
    one.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"1")))
    gone = details("UNAVAILABLE", "STALE_SNAPSHOT", 1.0)
    assert one.on_error(gone, has_other=True, now_s=0, jitter=0) == Retry(0.0)
    assert not one.outgoing().options.HasField("resume")
    one.on_message(pb.GenerateResponse(started=pb.Started(request_id="q", seed=8, resume_token=b"2")))
    one.on_message(pb.GenerateResponse(tokens=pb.Tokens(ids=[3], text="c", position=0)))
    assert one.started is not None and one.started.request_id == "q" and one.resumes == 0


def test_a_request_with_tokens_or_with_a_callers_token_keeps_its_version() -> None:
    """Its next send carries the resume token and waits for the Retry-After: its version may come back."""
    gone = details("UNAVAILABLE", "STALE_SNAPSHOT", 1.0)
    one = started(call_state())
    step = one.on_error(gone, has_other=True, now_s=0, jitter=0)
    assert isinstance(step, Retry) and step.after_s >= 1.0
    assert one.outgoing().options.resume == pb.Resume(resume_token=b"1", received_token_ids=[1, 2])
    message = request()
    message.options.resume.resume_token = b"own"
    other = CallState(message, RetryPolicy(), 100.0, has_own_key=False)
    other.outgoing()
    other.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"1")))
    other.on_error(gone, has_other=True, now_s=0, jitter=0)
    assert other.outgoing().options.resume.resume_token == b"1"


def test_a_stream_whose_version_stays_away_ends_with_its_tokens() -> None:
    """Each further send would be in vain. A new `started` begins the count anew, a move counts not, and time must pass."""
    gone = details("UNAVAILABLE", "STALE_SNAPSHOT", 1.0)
    one = started(call_state())
    for _ in range(VERSION_GONE_MAX - 1):
        assert isinstance(one.on_error(gone, has_other=True, now_s=9, jitter=0), Retry)
    assert isinstance(one.on_error(gone, has_other=True, now_s=9, jitter=0, step=RegionStep.MOVE), Retry)
    one.outgoing()
    one.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"2")))
    times_s = [10.0, 10.1, 10.2, 10.0 + VERSION_GONE_S - 0.1, 10.0 + VERSION_GONE_S]
    steps = [one.on_error(gone, has_other=True, now_s=at_s, jitter=0) for at_s in times_s]
    assert [isinstance(each, Retry) for each in steps] == [True] * 4 + [False]
    assert isinstance(steps[-1], GiveUp) and steps[-1].error.reason == "STALE_SNAPSHOT"
    assert one.with_output(steps[-1].error).ids == [1, 2]


def test_a_callers_own_key_that_is_sent_again_later_ends_the_call() -> None:
    """Two clients with one key do not supersede each other for ever."""
    step = started(call_state(has_own_key=False)).on_error(
        details("ABORTED", "SUPERSEDED"), has_other=True, now_s=0, jitter=0
    )
    assert isinstance(step, GiveUp) and isinstance(step.error, Superseded)


def test_two_readers_of_one_request_do_not_supersede_each_other_for_ever() -> None:
    """Late sends of the same request may supersede the call twice. A third time in a row means another reader."""
    one = started(call_state())
    status, steps = details("ABORTED", "SUPERSEDED"), list[Retry | GiveUp]()
    for at in range(3):
        steps.append(one.on_error(status, has_other=True, now_s=0, jitter=0))
        one.outgoing()
        one.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"1")))
        one.on_message(pb.GenerateResponse(tokens=pb.Tokens(ids=[3], text="c", position=2 + at)))
    assert [type(each) for each in steps] == [Retry, Retry, GiveUp]
    assert isinstance(steps[-1], GiveUp) and isinstance(steps[-1].error, Superseded)


def test_a_resume_token_of_the_callers_own_is_refused_once() -> None:
    """No frontend can read a token that no frontend made."""
    asked = request()
    asked.options.resume.resume_token = b"garbage"
    one = CallState(asked, RetryPolicy(), 100.0, has_own_key=False)
    one.outgoing()
    refused = details("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    step = one.on_error(refused, has_other=True, now_s=0, jitter=0)
    assert isinstance(step, GiveUp) and isinstance(step.error, RequestRefused)


def test_a_resume_token_of_the_mesh_is_sent_to_one_other_frontend() -> None:
    """The first frontend may run another release; two refusals are final."""
    one, refused = started(call_state()), details("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    assert isinstance(one.on_error(refused, has_other=True, now_s=0, jitter=0), Retry)
    one.outgoing()
    assert isinstance(one.on_error(refused, has_other=True, now_s=0, jitter=0), GiveUp)


def test_a_stream_under_way_waits_for_a_full_survivor() -> None:
    """The first frontend died and the other is full. Slots become free, and the execution is kept that long."""
    one, now_s, waits = started(call_state()), 0.0, 0
    full = details("RESOURCE_EXHAUSTED", "LIVE_REQUESTS_FULL", 0.05)
    while isinstance(step := one.on_error(full, has_other=False, now_s=now_s, jitter=0.5), Retry):
        now_s, waits = now_s + step.after_s, waits + 1
        one.outgoing()
    assert isinstance(step.error, MeshFull)
    assert FULL_WAIT_S <= now_s < FULL_WAIT_S + 3 and waits < 60


def test_the_retry_after_of_one_frontend_does_not_end_the_request() -> None:
    """The frontend drains, no other is known to be up, and the deadline is nearer than its Retry-After."""
    one = started(call_state(deadline_s=1.0))
    draining = details("UNAVAILABLE", "DRAINING", 1.0)
    assert isinstance(one.on_error(draining, has_other=False, now_s=0.5, jitter=0), Retry)


def test_a_full_mesh_is_retried_after_its_retry_after_and_not_for_ever() -> None:
    """RetryInfo is honoured; after `refusals_max` consecutive refusals the request fails."""
    one, waits = call_state(), []
    while isinstance(
        step := one.on_error(
            details("RESOURCE_EXHAUSTED", "QUEUE_FULL", 3.0), has_other=True, now_s=0, jitter=0.5
        ),
        Retry,
    ):
        waits.append(step.after_s)
        one.outgoing()
    assert len(waits) == RetryPolicy().refusals_max - 1 and all(3.0 <= each <= 3.75 for each in waits)
    assert isinstance(step.error, MeshFull) and step.error.retry_after_s == 3.0


def test_a_loss_after_the_deadline_is_the_deadline() -> None:
    """The deadline has passed, and the frontend's last status does not matter."""
    step = call_state(deadline_s=2.0).on_lost("gone", has_other=True, now_s=2.0, jitter=0.5)
    assert isinstance(step, GiveUp) and isinstance(step.error, DeadlinePassed)


def test_a_deadline_during_retries_names_the_last_failure() -> None:
    """The error names the last failure and the whole time of the request."""
    one = CallState(request(), RetryPolicy(), 120.0, has_own_key=True, began_s=100.0)
    one.outgoing()
    away = details("UNAVAILABLE", "NO_ROUTER", 1.0)
    assert isinstance(one.on_error(away, has_other=False, now_s=105.0, jitter=0), Retry)
    one.outgoing()
    over = details("DEADLINE_EXCEEDED", "DEADLINE", metadata={"fault": "NO_ROUTER"})
    over = dataclasses.replace(over, message="the time as the frontend knows it")
    step = one.on_error(over, has_other=False, now_s=119.99, jitter=0)
    error = one.deadline_error()
    assert isinstance(error, DeadlinePassed)
    assert isinstance(step, GiveUp) and step.error.message == error.message
    assert (error.reason, error.code) == ("DEADLINE", "DEADLINE_EXCEEDED")
    assert (error.last_reason, error.last_message) == ("NO_ROUTER", "why")
    assert error.message == (
        "the request did not end within its 20 s; 0 tokens arrived; "
        "the last attempt ended with NO_ROUTER: why"
    )
    short = one.on_error(
        details("DEADLINE_EXCEEDED", "INFEASIBLE_DEADLINE"), has_other=False, now_s=119.95, jitter=0
    )
    assert isinstance(short, GiveUp) and isinstance(short.error, DeadlinePassed)
    assert (short.error.reason, short.error.last_reason) == ("INFEASIBLE_DEADLINE", "NO_ROUTER")
    assert short.error.message == "why; the last attempt ended with NO_ROUTER: why"


def test_the_error_of_a_deadline_names_the_callers_whole_time() -> None:
    """The frontend knows the time of its own call only. The fault that it waited for stays in the error."""
    for metadata, last in (({"fault": "NO_ROUTER"}, "NO_ROUTER"), ({}, "FRONTEND_LOST")):
        one = started(CallState(request(), RetryPolicy(), 60.0, has_own_key=True))
        assert isinstance(one.on_lost("gone", has_other=True, now_s=58.0, jitter=0), Retry)
        one.outgoing()
        over = details("DEADLINE_EXCEEDED", "DEADLINE", metadata=metadata)
        step = one.on_error(over, has_other=True, now_s=59.99, jitter=0)
        assert isinstance(step, GiveUp) and isinstance(step.error, DeadlinePassed)
        assert step.error.last_reason == last
        assert step.error.message.startswith("the request did not end within its 60 s; 2 ")


def test_a_deadline_of_the_class_or_after_tokens_keeps_its_message() -> None:
    """The frontend reports a limit of the class. A failure before the newest token is not the cause."""
    one = call_state()
    over = details("DEADLINE_EXCEEDED", "DEADLINE")
    step = one.on_error(over, has_other=True, now_s=50.0, jitter=0)
    assert isinstance(step, GiveUp) and step.error.message == "why"
    other = call_state()
    other.outgoing()
    assert isinstance(other.on_lost("gone", has_other=True, now_s=1.0, jitter=0), Retry)
    error = started(other).deadline_error()
    assert isinstance(error, DeadlinePassed) and error.last_reason == ""
    assert "attempt" not in error.message


def test_a_wait_beyond_the_deadline_does_not_begin() -> None:
    """The caller gets the error at once."""
    step = call_state(deadline_s=2.0).on_error(
        details("RESOURCE_EXHAUSTED", "QUEUE_FULL", 3.0), has_other=True, now_s=0, jitter=0
    )
    assert isinstance(step, GiveUp) and isinstance(step.error, MeshFull)


def test_an_unavailable_mesh_fails_the_request() -> None:
    """Sends without progress are bounded, and their backoff grows."""
    one, waits = started(call_state()), []
    while isinstance(step := one.on_lost("refused", has_other=False, now_s=0, jitter=1.0), Retry):
        waits.append(step.after_s)
        one.outgoing()
    assert isinstance(step.error, MeshUnavailable)
    assert len(waits) == RetryPolicy().sends_max - 1
    assert waits == sorted(waits) and 5 <= sum(waits) <= 30


@pytest.mark.parametrize(("tokens", "sends"), [(0, 3), (1, 7)])
def test_a_stream_that_runs_may_be_sent_more_often(tokens: int, sends: int) -> None:
    """A user at a terminal hears soon that no mesh is there, and keeps an answer that has begun."""
    one = CallState(request(), RetryPolicy(sends_max=7, first_sends_max=3), 1e6, has_own_key=True)
    one.outgoing()
    if tokens:
        started(one)
    count = 1
    while isinstance(one.on_lost("refused", has_other=False, now_s=0, jitter=1.0), Retry):
        one.outgoing()
        count += 1
    assert count == sends


def test_a_message_that_grpc_refuses_is_not_sent_again() -> None:
    """gRPC's own status has no details. The frontend is there, and another one would refuse the message, too."""
    text = "SERVER: Received message larger than max (5000043 vs. 4259840)"
    told = ErrorDetails(grpc.StatusCode.RESOURCE_EXHAUSTED, text, "", {}, None, {})
    one = call_state()
    one.outgoing()
    step = one.on_error(told, has_other=True, now_s=0, jitter=0)
    assert isinstance(step, GiveUp) and isinstance(step.error, RequestRefused)
    assert (step.error.reason, step.error.message) == ("MESSAGE_TOO_LARGE", text)


def test_another_service_at_the_address_is_named() -> None:
    """For example a router of the mesh."""
    step = call_state().on_error(details("UNIMPLEMENTED"), has_other=True, now_s=0, jitter=0)
    assert isinstance(step, GiveUp) and step.error.message.startswith("this address is no frontend of kvmesh")


def test_an_unknown_status_does_not_crash() -> None:
    """A newer mesh may send a status that this client does not know."""
    assert type(error_of(details("DATA_LOSS", "NEW"))) is MeshUnavailable
    assert call_state().on_message(pb.GenerateResponse()) is None


def test_the_ttft_timeout_covers_all_sends() -> None:
    """Each send gets the rest of the timeout. The request fails at its end, although the deadline is far."""
    asked = pb.GenerateRequest(text="x", idempotency_key="k")
    asked.limits.ttft_timeout.FromMilliseconds(2000)
    one = CallState(asked, RetryPolicy(), 200.0, has_own_key=True, began_s=100.0)
    assert one.outgoing(100.0).limits.ttft_timeout.ToMilliseconds() == 2000
    assert isinstance(one.on_lost("frozen", has_other=True, now_s=101.5, jitter=0), Retry)
    assert not one.is_over(101.5)
    assert one.outgoing(101.5).limits.ttft_timeout.ToMilliseconds() == 500
    assert one.request.limits.ttft_timeout.ToMilliseconds() == 2000
    assert one.is_over(102.0)
    step = one.on_lost("frozen", has_other=True, now_s=104.0, jitter=0)
    assert isinstance(step, GiveUp) and isinstance(step.error, DeadlinePassed)
    assert step.error.reason == "TTFT_TIMEOUT" and "within its 2 s" in step.error.message


def test_a_pause_beyond_the_ttft_timeout_does_not_begin() -> None:
    """A resume with tokens has no TTFT timeout."""
    asked = pb.GenerateRequest(text="x", idempotency_key="k")
    asked.limits.ttft_timeout.FromMilliseconds(2000)
    full = details("RESOURCE_EXHAUSTED", "QUEUE_FULL", 3.0)
    one = CallState(asked, RetryPolicy(), 200.0, has_own_key=True, began_s=100.0)
    one.outgoing(100.0)
    step = one.on_error(full, has_other=True, now_s=100.5, jitter=0)
    assert isinstance(step, GiveUp) and isinstance(step.error, MeshFull)
    two = started(CallState(asked, RetryPolicy(), 200.0, has_own_key=True, began_s=100.0))
    assert isinstance(two.on_error(full, has_other=True, now_s=100.5, jitter=0), Retry)
    assert not two.is_over(150.0)
    assert isinstance(two.on_lost("frozen", has_other=True, now_s=150.0, jitter=0), Retry)
    assert two.outgoing(150.0).limits.ttft_timeout.ToMilliseconds() == 2000


def test_a_resume_keeps_a_token_that_every_release_reads() -> None:
    """The first message of a resume may name the execution's place. An older frontend gets the first stream's token."""
    one = started(call_state())
    one.on_message(pb.GenerateResponse(tokens=pb.Tokens(ids=[3], position=2, resume_token=b"1 placed")))
    one.on_lost("gone", has_other=True, now_s=0, jitter=0)
    one.outgoing()
    one.on_message(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"2 placed")))
    one.on_lost("gone", has_other=True, now_s=0, jitter=0)
    assert one.outgoing().options.resume.resume_token == b"2 placed"
    refused = details("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    assert isinstance(one.on_error(refused, has_other=False, now_s=0, jitter=0), Retry)
    assert one.outgoing().options.resume.resume_token == b"1"


def test_a_caller_that_resumes_by_itself_keeps_its_own_token() -> None:
    """Every release may read the caller's token; the token of the first frontend may be newer."""
    asked = request()
    asked.options.resume.resume_token = b"own"
    one = started(CallState(asked, RetryPolicy(), 100.0, has_own_key=True))
    one.on_lost("gone", has_other=True, now_s=0, jitter=0)
    newest = one.outgoing().options.resume.resume_token
    assert newest != b"own"
    refused = details("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    assert isinstance(one.on_error(refused, has_other=False, now_s=0, jitter=0), Retry)
    assert one.outgoing().options.resume.resume_token == b"own"
