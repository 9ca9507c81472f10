"""One request, step by step: takeover before resume, retries, deadlines, flow control, cancels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.errors import TABLE, MeshError
from kvmesh.inference.v1 import inference_pb2
from kvmesh.metrics import Metrics
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.metrics import RequestMetrics
from services.frontend.requests import answers
from services.frontend.requests.attempts import Attempt
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.outcome import outcome_of
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.surface import messages
from tests.unit.frontend.fake_mesh import DETACHED_S, TOKEN_BYTES, Client, FakeMesh, oracle, spec

LONG = 4
"""Number of a request with at least 60 output tokens (checked below)."""


def mesh_of(routers: int = 1, *, attempts_max: int = 4, limit: int = 8, retries: float = 3.0) -> FakeMesh:
    core = FrontendCore(
        Limits(attempts_max, DETACHED_S, 16),
        limit=limit,
        retries=RetryBudget(0.0, retries, 1000.0),
        jitter=lambda: 0.5,
    )
    mesh = FakeMesh(core, random.Random(0), routers)
    for router in mesh.routers:
        mesh.open(router)
    return mesh


def begin(mesh: FakeMesh, **changes: object) -> Client:
    return Client(mesh.core, spec(LONG, **{"max_output_tokens": 60, **changes}), mesh.now_s)


def run(mesh: FakeMesh, client: Client, tokens: int) -> None:
    """Step until the client has at least `tokens` tokens."""
    for _ in range(1000):
        if len(client.ids) >= tokens:
            return
        mesh.settle()
        client.read(mesh.now_s)
    raise AssertionError(f"{client.request} does not move")


def end_of(client: Client) -> MeshError:
    """Return the error with which the request ended."""
    assert client.request.outcome is not None and client.request.outcome.error is not None
    return client.request.outcome.error


def finish(mesh: FakeMesh, client: Client) -> str:
    """Step until the request ends; return its outcome."""
    for _ in range(1000):
        mesh.settle()
        client.read(mesh.now_s)
        mesh.core.assert_consistent()
        if client.is_done:
            assert client.request.outcome is not None
            return client.request.outcome.name
        mesh.advance(0.01)
    raise AssertionError(f"{client.request} does not end")


def home(mesh: FakeMesh) -> str:
    """Return the name of the router that has the only slot."""
    (name,) = [peer.name for peer in mesh.core.peers if peer.slots]
    return name


def cut_home(mesh: FakeMesh) -> None:
    mesh.cut(next(router for router in mesh.routers if router.name == home(mesh)))


def lose_queued(mesh: FakeMesh) -> None:
    """Report the oldest attempt's replica as lost; no engine has the attempt yet."""
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    mesh.fail(mesh.runs[0], pb.Failure.CODE_REPLICA_LOST)


def whole(client: Client) -> list[int]:
    return oracle(client.spec.prompt_ids, client.spec.max_output_tokens)


def test_the_oracle_is_long_enough() -> None:
    """The oracle's output is long enough for the other tests, which break off within it."""
    assert len(oracle(spec(LONG).prompt_ids, 60)) == 60


def test_an_undisturbed_request_takes_one_attempt() -> None:
    """Without faults a request takes one attempt."""
    mesh = mesh_of()
    client = begin(mesh)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert [submit.attempt for submit in mesh.submits] == [1]
    assert mesh.submits[0].budget.max_output_tokens == 60
    assert client.request.progress.recomputed_tokens == 0


def test_a_stream_of_a_lost_router_is_taken_over_without_recomputing() -> None:
    """After its router is lost, a running attempt is taken over through another; the client sees nothing."""
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert (len(mesh.submits), mesh.adopts, client.request.takeovers) == (1, 1, 1)
    assert client.request.progress.recomputed_tokens == 0


def test_a_restarted_router_takes_streams_over() -> None:
    """With one router, the request waits for its return; nothing is recomputed."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    mesh.advance(DETACHED_S / 2)
    mesh.open(mesh.routers[0])
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert (len(mesh.submits), client.request.takeovers) == (1, 1)
    assert client.request.progress.recomputed_tokens == 0


def test_a_request_resumes_when_a_router_comes_after_the_detached_time() -> None:
    """After the detached time, a request resumes with a higher attempt behind the client's tokens."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    had = len(client.ids)
    cut_home(mesh)
    mesh.advance(DETACHED_S + 1)
    mesh.open(mesh.routers[0])
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    second = mesh.submits[1]
    assert (second.attempt, second.resumed, mesh.adopts) == (2, True, 0)
    assert second.start_position >= had
    assert second.budget.max_output_tokens == 60 - second.start_position
    ids = frames.unpack_ids(second.token_ids)
    assert list(ids[client.spec.prompt_tokens :]) == whole(client)[: second.start_position]
    assert client.request.progress.recomputed_tokens == len(ids) - 1


def test_a_refused_takeover_resumes_at_once() -> None:
    """After a refused takeover the request resumes at once, not after the detached time.

    The decode replica is gone, too.
    """
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    mesh.runs.clear()
    began_s = mesh.now_s
    assert finish(mesh, client) == "LENGTH"
    assert mesh.now_s - began_s < 1.0
    assert client.ids == whole(client)
    assert (len(mesh.submits), mesh.adopts, client.request.retry_state.resumes) == (2, 1, 1)


def test_an_attempt_that_no_engine_took_is_retried_from_the_budget() -> None:
    """A queued attempt lost with its replica costs a retry; without retry budget the client is told."""
    mesh = mesh_of(2)
    client = begin(mesh)
    lose_queued(mesh)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert (client.request.retry_state.retries, client.request.retry_state.resumes) == (1, 0)
    assert client.request.attempts[1].cause == inference_pb2.AttemptExplanation.CAUSE_RETRY

    poor = mesh_of(2, retries=0.0)
    client = begin(poor)
    lose_queued(poor)
    assert finish(poor, client) == "RETRY_BUDGET_EXHAUSTED"
    assert client.request.outcome is not None and client.request.outcome.error is not None
    assert client.request.outcome.error.retry_after_s is not None
    assert client.request.outcome.error.metadata["tokens_sent"] == "0"


def test_a_request_queued_in_a_lost_router_needs_no_retry_budget() -> None:
    """A request queued in a lost router is sent once more, whatever the retry budget.

    Many requests may wait in one router.
    """
    mesh = mesh_of(2, retries=0.0, limit=64)
    clients = [Client(mesh.core, spec(number, max_output_tokens=60), mesh.now_s) for number in range(48)]
    mesh.settle()
    mesh.cut(mesh.routers[0])
    assert {finish(mesh, client) for client in clients} <= {"LENGTH", "END_TOKEN"}
    assert all(client.ids == whole(client) for client in clients)
    assert mesh.core.retries.spent_total == 0


def test_a_resume_needs_no_retry_budget() -> None:
    """A request with received tokens never fails for lack of retry budget, however often it is refused."""
    mesh = mesh_of(retries=0.0)
    client = begin(mesh)
    run(mesh, client, 10)
    mesh.fail(mesh.runs[0], pb.Failure.CODE_ENGINE_LOST)
    for reason in (pb.Refusal.REASON_NO_REPLICA, pb.Refusal.REASON_KV_FULL, pb.Refusal.REASON_QUEUE_FULL):
        mesh.settle()  # deliver the failure or refusal
        mesh.advance(1.5)
        mesh.send_up(mesh.routers[0])
        mesh.arrive_up(mesh.routers[0])
        mesh.refuse(mesh.runs[-1], reason, 20)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert len(mesh.submits) == 5


@pytest.mark.parametrize(
    "reason",
    [pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_KV_FULL, pb.Refusal.REASON_QUEUE_TIMEOUT],
)
def test_a_full_mesh_is_not_asked_again(reason: pb.Refusal.Reason.ValueType) -> None:
    """A refusal for load is not retried; the client gets a Retry-After."""
    mesh = mesh_of(2)
    client = begin(mesh)
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    mesh.refuse(mesh.runs[0], reason, 250)
    outcome = finish(mesh, client)
    assert outcome == pb.Refusal.Reason.Name(reason).removeprefix("REASON_")
    assert client.request.outcome is not None and client.request.outcome.error is not None
    assert client.request.outcome.error.code.name == "RESOURCE_EXHAUSTED"
    assert client.request.outcome.error.retry_after_s == 0.25
    assert len(mesh.submits) == 1


def test_attempts_are_bounded_and_the_error_states_the_tokens_sent() -> None:
    """When every attempt is lost, the error states how many tokens were sent."""
    mesh = mesh_of(attempts_max=3)
    client = begin(mesh)
    for lost in range(1, 4):
        run(mesh, client, 3 * lost)
        mesh.fail(mesh.runs[0], pb.Failure.CODE_REPLICA_LOST)
        mesh.settle()
        mesh.advance(2.0)
    assert finish(mesh, client) == "ATTEMPTS_EXHAUSTED"
    assert client.request.outcome is not None and client.request.outcome.error is not None
    assert client.request.outcome.error.code.name == "UNAVAILABLE"
    assert client.request.outcome.error.metadata["tokens_sent"] == str(len(client.ids))
    assert client.ids == whole(client)[: len(client.ids)]
    assert len(mesh.submits) == 3


def test_a_gap_is_a_lost_attempt() -> None:
    """Missing tokens end the attempt: its slot is cancelled and the request resumes."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 5)
    log = mesh.runs[0].log
    while log.sent == min(log.end, log.credit):
        mesh.work(mesh.runs[0])
    mesh.skip(mesh.runs[0])
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert client.request.attempts[0].fault == "GAP"
    assert pb.Cancel.REASON_SUPERSEDED in mesh.cancels


@pytest.mark.parametrize("field", ["stop_token_ids", "end_token_ids"])
def test_an_engine_that_goes_on_behind_an_end_token_is_stopped(field: str) -> None:
    """The output ends at the token, in one attempt, and nothing runs on."""
    mesh = mesh_of()
    mesh.knows_one_end = True
    output = oracle(spec(LONG).prompt_ids, 60)
    end = next(token for at, token in enumerate(output) if at > 20 and token not in output[:at])
    client = begin(mesh, **{"end_token_ids": frozenset({0}), field: frozenset({0, end})})
    assert finish(mesh, client) == ("STOP_TOKEN" if field == "stop_token_ids" else "END_TOKEN")
    mesh.settle()
    assert client.ids == output[: output.index(end) + 1]
    assert len(client.request.attempts) == 1 and not mesh.runs


def test_the_pause_of_a_resumed_stream_is_explained() -> None:
    """From the last token before the loss to the first one behind it. The first attempt has none."""
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    mesh.advance(1.0)
    mesh.fail(mesh.runs[0], pb.Failure.CODE_REPLICA_LOST)
    mesh.advance(0.5)
    assert finish(mesh, client) == "LENGTH"
    first, *others = (each.explanation(1, "") for each in client.request.attempts)
    assert not first.HasField("pause") and len(others) == 1
    assert 1.5 <= others[0].pause.ToNanoseconds() / 1e9 < 30


@pytest.mark.parametrize("field", ["stop_token_ids", "end_token_ids"])
def test_an_output_that_ends_at_its_longest_is_told_by_its_last_token(field: str) -> None:
    """An engine that knows one end token says that the output is as long as it may be."""
    mesh = mesh_of()
    mesh.knows_one_end = True
    output = oracle(spec(LONG).prompt_ids, 60)
    end = next(token for at, token in enumerate(output) if at > 20 and token not in output[:at])
    longest = output.index(end) + 1
    ends = {"end_token_ids": frozenset({0}), field: frozenset({0, end})}
    client = begin(mesh, max_output_tokens=longest, **ends)
    assert finish(mesh, client) == ("STOP_TOKEN" if field == "stop_token_ids" else "END_TOKEN")
    assert len(client.ids) == longest


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_stop_token_is_told_apart_from_the_end_token(is_cut: bool) -> None:
    """By the finish of the engine, and by a frontend that lost it. The stop token is an output token."""
    mesh = mesh_of(2)
    output = oracle(spec(LONG).prompt_ids, 60)
    stop = next(token for at, token in enumerate(output) if at > 20 and token not in output[:at])
    client = begin(mesh, stop_token_ids=frozenset({stop}))
    run(mesh, client, 10)
    if is_cut:
        cut_home(mesh)
    assert finish(mesh, client) == "STOP_TOKEN"
    assert client.ids == output[: output.index(stop) + 1]
    assert client.request.was_resumed == is_cut


def test_a_stop_string_ends_the_engine_too() -> None:
    """The frontend finds the stop string and cancels the slot as complete."""
    mesh = mesh_of()
    text = b"".join(TOKEN_BYTES[each] for each in oracle(spec(LONG).prompt_ids, 60)).decode(errors="replace")
    client = begin(mesh, stop=(text[20:23],))
    assert finish(mesh, client) == "STOP_STRING"
    mesh.settle()
    assert client.text == text[: text.index(text[20:23])]
    assert mesh.cancels == [pb.Cancel.REASON_COMPLETE]
    assert not mesh.runs
    last = messages.finished(client.request, "frontend-0", "local", is_seeded=True).finished
    assert last.stop_string == text[20:23]
    assert last.usage.output_token_count == len(client.ids) < 60


def test_the_window_follows_the_client_not_the_engine() -> None:
    """A client that does not read is sent one window; each half window read is granted again."""
    mesh = mesh_of()
    client = Client(mesh.core, spec(9, max_output_tokens=200, end_token_ids=frozenset()), mesh.now_s)
    mesh.settle(300)
    request = client.request
    assert request.progress.window_end == len(request.progress.ids) == 64
    assert mesh.submits[0].credit_position == 64
    client.read(mesh.now_s)
    mesh.settle(5)
    assert len(request.progress.ids) == 128
    assert request.state.value == "attached"


@pytest.mark.parametrize("phase", ["waiting", "queued", "accepted", "placed", "started", "running"])
def test_a_client_that_leaves_is_cancelled_in_every_phase(phase: str) -> None:
    """When a client leaves, one cancel ends its attempt in every phase and nothing is left."""
    mesh = mesh_of()
    if phase == "waiting":
        mesh.cut(mesh.routers[0])
    client = begin(mesh)
    mesh.send_up(mesh.routers[0])
    mesh.arrive_up(mesh.routers[0])
    for stage in ("queued", "accepted", "placed", "started", "running"):
        if phase == "waiting":
            break
        assert mesh.runs[0].stage == stage
        if stage == phase:
            break
        mesh.work(mesh.runs[0])
        mesh.send_down(mesh.routers[0])
        mesh.arrive_down(mesh.routers[0])
    mesh.core.leave(client.request, mesh.now_s)
    mesh.core.leave(client.request, mesh.now_s)
    mesh.settle(2)
    assert not mesh.runs
    assert not mesh.core.admitted.serving and not mesh.core.admitted.leaving
    assert mesh.core.next_wake_s() is None
    assert mesh.cancels == ([] if phase == "waiting" else [pb.Cancel.REASON_CLIENT])


def test_the_detached_stream_of_a_client_that_left_is_cancelled_when_a_router_is_back() -> None:
    """The detached stream of a client that left is cancelled when a router is back.

    Otherwise the engine would run until the end of the detached time.
    """
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    mesh.core.leave(client.request, mesh.now_s)
    assert (len(mesh.core.admitted), len(mesh.core.admitted.leaving)) == (0, 1)
    mesh.advance(0.5)
    mesh.open(mesh.routers[0])
    mesh.settle(2)
    assert not mesh.runs and mesh.cancels == [pb.Cancel.REASON_CLIENT]
    assert not mesh.core.admitted.leaving

    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    mesh.core.leave(client.request, mesh.now_s)
    mesh.advance(DETACHED_S)
    assert not mesh.core.admitted.leaving and mesh.core.next_wake_s() is None


def test_the_clients_deadline_is_an_error_and_the_meshs_is_an_answer() -> None:
    """The client's deadline ends the request with an error, the class's deadline with an answer.

    Both stop the engine.
    """
    for is_clients, outcome in ((True, "DEADLINE_EXCEEDED"), (False, "FINISHED")):
        mesh = mesh_of()
        client = begin(mesh, deadline_s=mesh.now_s + 1.0, is_clients_deadline=is_clients)
        run(mesh, client, 10)
        mesh.advance(1.0)
        client.read(mesh.now_s)
        end = client.request.outcome
        assert end is not None
        if end.error is not None:
            assert (end.error.code.name, end.name) == (outcome, "DEADLINE")
        else:
            assert (end.finish_reason, outcome) == (inference_pb2.FINISH_REASON_DEADLINE, "FINISHED")
            assert end.name == "DEADLINE_CUT"
        assert client.ids == whole(client)[: len(client.ids)]
        mesh.settle()
        assert mesh.cancels == [pb.Cancel.REASON_DEADLINE] and not mesh.runs


def test_a_deadline_without_a_router_says_so() -> None:
    """A deadline that passes without a router is reported as NO_ROUTER, with tokens and without."""
    for tokens in (0, 10):
        mesh = mesh_of()
        client = begin(mesh, deadline_s=mesh.now_s + 4.0)
        if tokens:
            run(mesh, client, tokens)
        cut_home(mesh) if tokens else mesh.cut(mesh.routers[0])
        mesh.runs.clear()
        mesh.advance(4.0)
        error = end_of(client)
        assert (error.reason, error.metadata["fault"]) == ("DEADLINE", "NO_ROUTER")
        assert "did not end within 4.000 s: no router is reachable;" in error.message


@pytest.mark.parametrize("how", ["is_resumed", "is_keyed"])
def test_a_resumed_request_is_told_the_time_that_was_left(how: str) -> None:
    """A resumed or keyed request is told the time that was left on arrival.

    It may have run elsewhere before, so the time left is not the client's whole deadline.
    """
    mesh = mesh_of()
    client = begin(mesh, deadline_s=mesh.now_s + 1.0, **{how: True})
    run(mesh, client, 10)
    mesh.advance(1.0)
    error = end_of(client)
    assert error.reason == "DEADLINE" and "fault" not in error.metadata
    assert "within the 1.000 s that were left when it came here;" in error.message


def test_every_outcome_has_a_series_of_its_own() -> None:
    """No finish reason has the name of an error, so an alert on errors does not count answers."""
    good = [outcome_of(reason) for reason in inference_pb2.FinishReason.values()[1:]]
    assert not set(good) & set(TABLE) and len(set(good)) == len(good)
    metrics = Metrics("frontend")
    counts = RequestMetrics(metrics, TenantMetrics(metrics, ()))
    for is_clients in (True, False):
        mesh = mesh_of()
        mesh.core._observer = counts
        client = begin(mesh, deadline_s=mesh.now_s + 1.0, is_clients_deadline=is_clients)
        run(mesh, client, 10)
        mesh.advance(1.0)
    text = metrics.text().decode()
    for outcome in ("DEADLINE", "DEADLINE_CUT"):
        assert f'kvmesh_frontend_requests_total{{outcome="{outcome}"}} 1.0' in text


def test_a_late_first_token_is_its_own_error() -> None:
    """A first token after its own deadline ends the request as TTFT_TIMEOUT.

    The limit ends with the first token.
    """
    mesh = mesh_of()
    client = begin(mesh, ttft_deadline_s=mesh.now_s + 0.5)
    mesh.settle()
    mesh.advance(0.5)
    assert finish(mesh, client) == "TTFT_TIMEOUT"
    mesh = mesh_of()
    client = begin(mesh, ttft_deadline_s=mesh.now_s + 0.5)
    run(mesh, client, 1)
    mesh.advance(1.0)
    assert finish(mesh, client) == "LENGTH"


@pytest.mark.parametrize("fault", ["cut", "deadline"])
def test_all_tokens_and_no_finish_is_an_end(fault: str) -> None:
    """A request with all tokens ends well although the finish is late or lost; nothing is retried."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 50)
    while len(client.request.progress.ids) < 60:
        mesh.work(mesh.runs[0])
        for slot, each in mesh.routers[0].runs.items():
            if (chunk := each.log.take()) is not None:
                mesh.routers[0].down.tokens(slot, chunk.position, chunk.token_ids)
        message = mesh.routers[0].down.take(mesh.now_s)
        if message is not None:
            mesh.core.on_response(mesh.routers[0], message, mesh.now_s)
        client.read(mesh.now_s)
    assert client.request.outcome is None
    if fault == "cut":
        mesh.cut(mesh.routers[0])
    else:
        client.request.end_by_deadline(mesh.now_s)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client) and len(mesh.submits) == 1


def test_a_resumed_client_goes_on_where_it_was() -> None:
    """Another frontend continues from the resume token and the received ids.

    Its attempts are numbered above all possible attempts of the first frontend.
    """
    first = mesh_of()
    client = begin(first)
    run(first, client, 20)
    resume = client.spec.resume_token()
    second = begin(
        first, attempt_base=resume.attempt_base + 256, is_resumed=True, received_ids=tuple(client.ids)
    )
    assert finish(first, client) == "SUPERSEDED"
    assert finish(first, second) == "LENGTH"
    assert [*second.spec.execution.received_ids, *second.ids] == whole(client)
    assert first.submits[1].attempt == 257 and first.submits[1].resumed


@pytest.mark.parametrize("count", [0, 1, 59, 60])
def test_a_resume_from_anywhere_is_complete(count: int) -> None:
    """A resume is complete from any position: none, almost all, or all but the last message received."""
    mesh = mesh_of()
    ids = tuple(oracle(spec(LONG).prompt_ids, 60)[:count])
    client = begin(mesh, attempt_base=256, is_resumed=True, received_ids=ids)
    assert finish(mesh, client) == "LENGTH"
    assert [*ids, *client.ids] == whole(client)
    assert len(mesh.submits) == (0 if count == 60 else 1)


@pytest.mark.parametrize("count", [0, 1])
def test_a_resume_token_alone_does_not_bypass_the_queue(count: int) -> None:
    """Only a resume with received tokens goes to the head of the queue.

    Each attempt that no engine took costs retry budget, with a resume token or without.
    """
    mesh = mesh_of(2, retries=0.0)
    ids = tuple(oracle(spec(LONG).prompt_ids, 60)[:count])
    client = begin(mesh, attempt_base=256, is_resumed=True, received_ids=ids)
    mesh.settle()
    assert [submit.resumed for submit in mesh.submits] == [count > 0]
    lose_queued(mesh)
    assert finish(mesh, client) == "RETRY_BUDGET_EXHAUSTED"


def test_a_reused_resume_token_is_refused_by_a_full_mesh() -> None:
    """A full mesh refuses a resume token without received tokens like a new request.

    The client gets a Retry-After, and no attempt is sent again.
    """
    mesh = mesh_of(2)
    client = begin(mesh, attempt_base=256, is_resumed=True)
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    mesh.refuse(mesh.runs[0], pb.Refusal.REASON_QUEUE_FULL, 250)
    assert finish(mesh, client) == "QUEUE_FULL"
    assert len(mesh.submits) == 1


def steal(mesh: FakeMesh) -> None:
    """Take the attempt away from its slot by a late adopt through a broken stream."""
    (attempt,) = mesh.runs
    router, slot = attempt.router, attempt.slot
    assert router is not None
    router.runs.clear()
    router.downward.clear()
    attempt.router, attempt.detached_until_s = None, mesh.now_s + DETACHED_S
    answer = pb.AttachResponse()
    answer.finishes.add(slot=slot, end_position=attempt.log.end, reason=pb.Finish.REASON_ADOPTED)
    mesh.core.on_response(router, answer, mesh.now_s)
    mesh.core.assert_consistent()


def test_a_late_takeover_of_the_request_itself_is_only_a_lost_slot() -> None:
    """A late adopt by the request itself is only a lost slot: it is adopted again.

    The client sees nothing.
    """
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    steal(mesh)
    assert client.request.state.value == "taking over"
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert (len(mesh.submits), client.request.takeovers) == (1, 1)


def test_an_attempt_that_is_taken_again_and_again_is_resumed() -> None:
    """A request that loses its attempt to adopts again and again resumes after a limited number."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    for _ in range(20):
        if len(mesh.submits) > 1:
            break
        steal(mesh)
        for router in mesh.routers:
            mesh.send_up(router)
            mesh.arrive_up(router)
    assert mesh.adopts == 4, "the limit of attempts"
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert client.request.attempts[0].fault == "ADOPTED"


def test_requests_are_limited_and_their_slots_come_back() -> None:
    """A frontend at its concurrency limit refuses a request with a Retry-After; an end makes room."""
    mesh = mesh_of(limit=1)
    client = begin(mesh)
    with pytest.raises(Exception, match="1/1 requests are admitted") as caught:
        begin(mesh)
    assert caught.value.code.name == "RESOURCE_EXHAUSTED"  # type: ignore[attr-defined]
    assert caught.value.retry_after_s > 0  # type: ignore[attr-defined]
    finish(mesh, client)
    begin(mesh)


def test_a_request_that_is_read_takes_a_slot() -> None:
    """A request being parsed takes a slot of the concurrency limit."""
    mesh = mesh_of(limit=2)
    begin(mesh)
    with mesh.core.capacity_to_read(mesh.now_s):
        with pytest.raises(MeshError, match="2/2 requests are admitted"):
            mesh.core.capacity_to_read(mesh.now_s).__enter__()
        with pytest.raises(MeshError, match="2/2 requests are admitted"):
            begin(mesh)
    with pytest.raises(KeyError), mesh.core.capacity_to_read(mesh.now_s):
        raise KeyError
    begin(mesh)
    mesh.core.is_draining = True
    with pytest.raises(MeshError, match="shutting down"):
        mesh.core.capacity_to_read(mesh.now_s)


def test_a_bug_ends_one_request_alone() -> None:
    """A bug in one request does not end the other requests of the lost router."""
    mesh = mesh_of(2)
    clients = [Client(mesh.core, spec(each, session_id="s"), mesh.now_s) for each in (1, 2)]
    mesh.settle(6)
    clients[0].request.on_link_lost = None  # type: ignore[assignment,method-assign]
    cut_home(mesh)
    assert clients[0].request.outcome is not None and clients[0].request.outcome.name == "INTERNAL"
    finish(mesh, clients[1])
    assert clients[1].ids == whole(clients[1])


ROWS: dict[str, Callable[[pb.AttachResponse, int], object]] = {
    "acceptances": lambda message, slot: message.acceptances.add(slot=slot),
    "placements": lambda message, slot: message.placements.add(slot=slot),
    "starts": lambda message, slot: message.starts.add(slot=slot),
    "first_tokens": lambda message, slot: message.first_tokens.add(slot=slot, token_id=5),
    "transfers": lambda message, slot: message.transfers.add(slot=slot),
    "finishes": lambda message, slot: message.finishes.add(slot=slot),
    "failures": lambda message, slot: message.failures.add(slot=slot),
    "refusals": lambda message, slot: message.refusals.add(slot=slot),
}


@pytest.mark.parametrize("field", answers.TAKERS)
def test_a_bug_in_a_row_ends_its_request_alone(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in one row ends its request; the router's stream and its other requests go on."""
    mesh = mesh_of()
    clients = [Client(mesh.core, spec(each), mesh.now_s) for each in (1, 2)]
    (router,) = mesh.routers
    mesh.send_up(router)
    mesh.arrive_up(router)
    original = answers.TAKERS[field]

    def broken(request: LiveRequest, *arguments: Any) -> None:
        if request is clients[0].request:
            raise KeyError(field)
        original(request, *arguments)

    monkeypatch.setitem(answers.TAKERS, field, broken)
    message = pb.AttachResponse()
    if field == "frame":
        outbox = DownwardOutbox()
        outbox.tokens(1, 0, frames.pack_ids((5,)))
        message = outbox.take(mesh.now_s) or message
    else:
        ROWS[field](message, 1)
    mesh.core.on_response(router, message, mesh.now_s)
    mesh.core.assert_consistent()
    assert clients[0].request.outcome is not None and clients[0].request.outcome.name == "INTERNAL"
    assert router.is_up and clients[1].request.outcome is None
    finish(mesh, clients[1])
    assert clients[1].ids == whole(clients[1])


def test_a_bug_at_the_start_gives_the_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends by a bug at its start gives its slot back."""
    mesh = mesh_of(limit=1)
    monkeypatch.setattr(RequestSpec, "submission", None)
    client = begin(mesh)
    assert client.request.outcome is not None and client.request.outcome.name == "INTERNAL"
    mesh.core.assert_consistent()
    assert not mesh.core.admitted.serving and not mesh.core.admitted.leaving
    assert not any(peer.slots for peer in mesh.core.peers)
    assert mesh.core.next_wake_s() is None
    monkeypatch.undo()
    assert finish(mesh, begin(mesh)) == "LENGTH"


def test_a_session_keeps_its_router_while_it_is_up() -> None:
    """Session affinity is by name: the same choice in every frontend; only a lost router's share moves."""
    mesh = mesh_of(3)
    chosen = {each: mesh.core.peers.choose("default", f"session-{each}").name for each in range(300)}  # type: ignore[union-attr]
    assert {*chosen.values()} == {"router-0", "router-1", "router-2"}
    mesh.cut(mesh.routers[1])
    for each, name in chosen.items():
        now = mesh.core.peers.choose("default", f"session-{each}").name  # type: ignore[union-attr]
        assert now != "router-1" and (name in (now, "router-1"))


def test_the_explanation_lists_every_attempt() -> None:
    """The explanation states each attempt's cause, replica and fault."""
    mesh = mesh_of()
    client = begin(mesh, explain=True)
    run(mesh, client, 10)
    mesh.fail(mesh.runs[0], pb.Failure.CODE_ENGINE_LOST)
    finish(mesh, client)
    told = messages.finished(client.request, "frontend-0", "local", is_seeded=False).finished
    assert told.resumed
    first, second = told.explanation.attempts
    assert (first.number, first.fault, first.decode_replica) == (1, "ENGINE_LOST", "decode-0")
    assert (second.number, second.cause) == (2, inference_pb2.AttemptExplanation.CAUSE_RESUME)
    assert second.start_position >= 10
    assert told.usage.recomputed_token_count > 0
    assert told.explanation.total.ToNanoseconds() >= told.explanation.time_to_first_token.ToNanoseconds()


def test_candidates_are_reported_as_the_router_sent_them() -> None:
    """Candidates are reported as the router sent them; a decode cost of 0 is present, not absent."""
    placement = pb.Placement(decode_replica="decode-0", reason="it is less")
    placement.candidates.add(replica="decode-0", prefill_us=10_200, decode_us=9_800, score=0.02)
    placement.candidates.add(replica="prefill-0", queue_us=7, decode_us=0, score=0.03)
    placement.candidates.add(replica="prefill-1", matched_block_count=3)
    attempt = Attempt(
        1, inference_pb2.AttemptExplanation.CAUSE_FIRST, 0, 9, "router-0", 0.0, placement=placement
    )
    told = attempt.explanation(1, "eu")
    assert told.reason == "it is less"
    chosen, *others = told.candidates
    assert (chosen.replica, chosen.prefill.ToMicroseconds(), chosen.score) == ("decode-0", 10_200, 0.02)
    assert chosen.decode.ToMicroseconds() == 9_800
    assert [each.HasField("decode") for each in others] == [True, False]
    assert (others[0].queue.ToMicroseconds(), others[1].matched_block_count) == (7, 3)


def test_the_retry_budget_is_a_share_and_a_trickle() -> None:
    """The retry budget is 10 % of the requests and 3 per second, saved up for at most 10 s."""
    budget = RetryBudget(0.1, 3.0, 0.0)
    assert sum(budget.take(0.0) for _ in range(100)) == 30
    assert sum(budget.take(2.0) for _ in range(100)) == 6
    for _ in range(50):
        budget.on_request(2.0)
    assert sum(budget.take(2.0) for _ in range(100)) in (4, 5)
    assert sum(budget.take(1000.0) for _ in range(100)) == 40
    assert budget.spent_total + budget.refused_total == 400


def test_a_takeover_asks_for_the_missing_tokens() -> None:
    """An adopt asks for tokens from the first missing position, not from the start."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    had = len(client.request.progress.ids)
    cut_home(mesh)
    mesh.open(mesh.routers[0])
    message = mesh.routers[0].outbox.take(mesh.now_s)
    assert message is not None
    (adopt,) = message.adopts
    assert (adopt.position, adopt.attempt, adopt.decode_replica) == (had, 1, "decode-0")
    assert adopt.credit_position == min(60, had + 64)


def test_a_finish_before_the_last_tokens_is_a_gap() -> None:
    """A finish at another position than the client's output is a gap."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 40)
    while mesh.runs[0].stage != "finished":
        mesh.work(mesh.runs[0])
    mesh.skip(mesh.runs[0])
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert client.request.attempts[0].fault == "GAP" and len(mesh.submits) == 2


def test_a_replica_only_one_router_lost_is_reached_through_another() -> None:
    """The router that reported the replica's loss is the last one asked for a takeover."""
    for seed in range(8):
        mesh = mesh_of(2)
        client = begin(mesh, session_id=f"session-{seed}")
        run(mesh, client, 10)
        first, attempt = home(mesh), mesh.runs[0]
        router = attempt.router
        assert router is not None
        router.runs.clear()
        router.down.fail(
            attempt.slot, pb.Failure.CODE_REPLICA_LOST, "lost", replica="decode-0", untouched=False
        )
        attempt.router, attempt.detached_until_s = None, mesh.now_s + DETACHED_S
        mesh.settle()
        assert home(mesh) != first
        assert finish(mesh, client) == "LENGTH"
        assert client.ids == whole(client)
        assert (len(mesh.submits), client.request.takeovers) == (1, 1)


@pytest.mark.parametrize("row", ["finish", "failure"])
def test_a_takeover_that_is_answered_by_an_end_leaves_nothing(row: str) -> None:
    """An end that comes before the acceptance of an adopt leaves nothing behind."""
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    mesh.runs.clear()
    router = next(each for each in mesh.routers if each.is_up)
    answer = pb.AttachResponse()
    if row == "finish":
        answer.finishes.add(slot=1, end_position=60, reason=pb.Finish.REASON_DEADLINE)
    else:
        answer.failures.add(slot=1, code=pb.Failure.CODE_STALLED)
    mesh.core.on_response(router, answer, mesh.now_s)
    mesh.core.assert_consistent()
    assert finish(mesh, client) == ("DEADLINE" if row == "finish" else "LENGTH")
    assert not mesh.core.admitted.leaving and mesh.core.next_wake_s() is None


@pytest.mark.parametrize("leaves", [False, True])
def test_a_router_that_does_not_know_the_replica_yet_is_asked_again(leaves: bool) -> None:
    """A restarted router that does not know the replica yet is asked again; no prefill is repeated."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    (router,) = mesh.routers
    mesh.open(router)
    for slot in (1, 2, 3):
        message = router.outbox.take(mesh.now_s)
        assert message is not None and [adopt.slot for adopt in message.adopts] == [slot]
        answer = pb.AttachResponse()
        answer.refusals.add(slot=slot, reason=pb.Refusal.REASON_NO_REPLICA)
        mesh.core.on_response(router, answer, mesh.now_s)
        mesh.core.assert_consistent()
        if leaves and slot == 2:
            mesh.core.leave(client.request, mesh.now_s)
        mesh.advance(0.1)
    if leaves:
        mesh.settle(2)
        assert not mesh.runs and not mesh.core.admitted.leaving
        return
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert (len(mesh.submits), client.request.takeovers) == (1, 1)


def test_a_router_that_never_knows_the_replica_costs_the_detached_time() -> None:
    """With a router that never knows the replica, a request resumes after the detached time."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    cut_home(mesh)
    (router,) = mesh.routers
    mesh.open(router)
    until_s = mesh.now_s + DETACHED_S
    while mesh.now_s < until_s:
        message = router.outbox.take(mesh.now_s)
        if message is not None:
            answer = pb.AttachResponse()
            for adopt in message.adopts:
                answer.refusals.add(slot=adopt.slot, reason=pb.Refusal.REASON_NO_REPLICA)
            mesh.core.on_response(router, answer, mesh.now_s)
        mesh.advance(0.05)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert len(mesh.submits) == 2 and mesh.core.next_wake_s() is None


def test_a_cached_prompt_is_no_longer_than_the_prompt() -> None:
    """The reported cached tokens are at most the prompt's, although the output is cached, too."""
    mesh = mesh_of()
    ids = tuple(oracle(spec(LONG).prompt_ids, 60)[:40])
    client = begin(mesh, attempt_base=256, is_resumed=True, received_ids=ids)
    mesh.send_up(mesh.routers[0])
    prompt = client.spec.prompt_tokens
    answer = pb.AttachResponse()
    answer.first_tokens.add(slot=1, position=40, token_id=whole(client)[40], cached_token_count=prompt + 32)
    mesh.core.on_response(mesh.routers[0], answer, mesh.now_s)
    assert client.request.progress.cached_tokens == prompt
    assert client.request.progress.recomputed_tokens == 40 - 1 - 32
