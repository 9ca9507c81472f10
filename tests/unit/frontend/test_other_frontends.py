"""Takeover of a request by another frontend, superseded executions, and the watchdog for silent attempts."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.frontend.requests.resume_token import ATTEMPT_STRIDE
from services.frontend.requests.takeover import AttemptLocation
from tests.unit.frontend.fake_mesh import DETACHED_S, Client, FakeMesh, spec
from tests.unit.frontend.test_request import LONG, begin, finish, mesh_of, run, whole


def moved(
    mesh: FakeMesh, client: Client, *, epoch: int = 1, got: int | None = None, **changes: object
) -> Client:
    """Return the client of `client`'s request at another frontend, which is the same core in these tests."""
    location = client.request.location
    received = tuple(client.ids[:got])
    return begin(
        mesh,
        is_resumed=True,
        is_fenced=True,
        attempt_base=epoch * ATTEMPT_STRIDE,
        received_ids=received,
        location=location,
        **changes,
    )


def test_another_frontend_takes_over_a_running_attempt() -> None:
    """Another frontend takes over a running attempt without a submit or recomputed tokens.

    The earlier execution ends and cancels nothing.
    """
    mesh = mesh_of()
    first = begin(mesh)
    run(mesh, first, 10)
    assert first.request.location == AttemptLocation(1, first.request.attempts[0].decode_replica)
    second = moved(mesh, first, got=7)
    assert first.request.outcome is not None and first.request.outcome.name == "SUPERSEDED"
    assert first.request.state.value == "yielding"
    assert finish(mesh, second) == "LENGTH"
    assert first.ids[:7] + second.ids == whole(first)
    assert (len(mesh.submits), mesh.adopts, second.request.takeovers) == (1, 1, 1)
    mesh.settle()
    assert set(mesh.cancels) <= {pb.Cancel.REASON_COMPLETE}
    assert second.request.progress.recomputed_tokens == 0


def test_a_lost_attempt_is_computed_again_above_the_earlier_numbers() -> None:
    """After a refused takeover, the later execution continues with an attempt of its own.

    The attempt starts behind the client's tokens and has a number above the earlier execution's.
    """
    mesh = mesh_of()
    first = begin(mesh)
    run(mesh, first, 10)
    location = first.request.location
    mesh.core.leave(first.request, mesh.now_s)
    mesh.settle()
    second = begin(
        mesh,
        is_resumed=True,
        is_fenced=True,
        attempt_base=ATTEMPT_STRIDE,
        received_ids=tuple(first.ids),
        location=location,
    )
    assert finish(mesh, second) == "LENGTH"
    assert first.ids + second.ids == whole(first)
    assert [submit.attempt for submit in mesh.submits] == [1, ATTEMPT_STRIDE + 1]
    assert [attempt.fault for attempt in second.request.attempts] == ["FRONTEND_LOST", ""]
    assert second.request.progress.recomputed_tokens > 0


def test_an_attempt_without_a_takeover_is_cancelled_in_the_end() -> None:
    """A yielded attempt that no frontend takes over is cancelled after DETACHED_S."""
    mesh = mesh_of()
    client = begin(mesh)
    run(mesh, client, 10)
    mesh.core.supersede(client.request.spec.request_id, 1, mesh.now_s)
    assert client.request.outcome is not None and client.request.outcome.name == "SUPERSEDED"
    mesh.settle()
    assert mesh.cancels == []
    mesh.advance(DETACHED_S)
    mesh.settle()
    assert mesh.cancels == [pb.Cancel.REASON_SUPERSEDED]
    assert not mesh.core.admitted.leaving


def test_a_request_without_a_token_is_not_left_for_a_takeover() -> None:
    """A superseded request without a token is cancelled at once, since no takeover is possible.

    The later execution starts anew.
    """
    mesh = mesh_of()
    client = begin(mesh)
    mesh.send_up(mesh.routers[0])
    mesh.core.supersede(client.request.spec.request_id, 1, mesh.now_s)
    mesh.settle()
    assert mesh.cancels == [pb.Cancel.REASON_SUPERSEDED] and not mesh.core.admitted.leaving


@pytest.mark.parametrize("epoch", [0, 1])
def test_news_of_its_own_or_an_earlier_execution_changes_nothing(epoch: int) -> None:
    """Only a later execution supersedes a request; its own or an earlier epoch does not."""
    mesh = mesh_of()
    client = begin(mesh, attempt_base=ATTEMPT_STRIDE, is_resumed=True, is_fenced=True)
    run(mesh, client, 5)
    mesh.core.supersede(client.request.spec.request_id, epoch, mesh.now_s)
    assert finish(mesh, client) == "LENGTH"


def test_a_drain_hands_over_and_says_so() -> None:
    """A drain ends the request as DRAINING, and another frontend takes it over without a lost token."""
    mesh = mesh_of()
    first = begin(mesh)
    run(mesh, first, 10)
    mesh.core.hand_over([first.request], mesh.now_s)
    assert first.request.outcome is not None and first.request.outcome.name == "DRAINING"
    second = moved(mesh, first)
    assert finish(mesh, second) == "LENGTH"
    assert first.ids + second.ids == whole(first)
    assert len(mesh.submits) == 1


def test_an_execution_superseded_at_the_replica_does_not_outbid() -> None:
    """An execution ends without a retry when the replica reports its attempt superseded.

    Its attempt numbers are its own, so a higher one belongs to a later execution.
    """
    mesh = mesh_of()
    client = begin(mesh, attempt_base=ATTEMPT_STRIDE, is_resumed=True, is_fenced=True)
    run(mesh, client, 5)
    (attempt,) = mesh.runs
    assert attempt.router is not None
    answer = pb.AttachResponse()
    answer.finishes.add(slot=attempt.slot, end_position=attempt.log.end, reason=pb.Finish.REASON_SUPERSEDED)
    mesh.core.on_response(attempt.router, answer, mesh.now_s)
    assert client.request.outcome is not None and client.request.outcome.name == "SUPERSEDED"
    assert len(mesh.submits) == 1


def test_an_attempt_that_was_taken_over_is_outbid_by_a_late_one_only_once() -> None:
    """An execution that loses its adopted attempt to a late earlier one outbids it once.

    A frontend that was frozen retried below the later execution. The new attempt number is above all numbers
    of the earlier execution.
    """
    mesh = mesh_of()
    first = begin(mesh)
    run(mesh, first, 10)
    second = moved(mesh, first)
    run(mesh, second, 5)
    (attempt,) = mesh.runs
    router = attempt.router
    assert router is not None
    mesh.runs.remove(attempt)
    router.runs.pop(attempt.slot)
    answer = pb.AttachResponse()
    answer.finishes.add(slot=attempt.slot, end_position=attempt.log.end, reason=pb.Finish.REASON_SUPERSEDED)
    mesh.core.on_response(router, answer, mesh.now_s)
    assert finish(mesh, second) == "LENGTH"
    assert first.ids + second.ids == whole(first)
    assert [submit.attempt for submit in mesh.submits] == [1, ATTEMPT_STRIDE + 1]


def test_a_late_epoch_is_this_executions_own() -> None:
    """An execution that started before Redis answered is not ended by its own late epoch.

    Its next attempt has a number above those of earlier executions.
    """
    mesh = mesh_of()
    client = begin(mesh, is_keyed=True, owner="me")
    run(mesh, client, 5)
    mesh.core.supersede(client.request.spec.request_id, 1, mesh.now_s, "me")
    assert client.request.outcome is None and client.request.spec.execution.epoch == 1
    (attempt,) = mesh.runs
    assert attempt.router is not None
    attempt.router.runs.pop(attempt.slot)
    mesh.runs.remove(attempt)
    answer = pb.AttachResponse()
    answer.finishes.add(slot=attempt.slot, end_position=attempt.log.end, reason=pb.Finish.REASON_SUPERSEDED)
    mesh.core.on_response(attempt.router, answer, mesh.now_s)
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)
    assert [submit.attempt for submit in mesh.submits] == [1, ATTEMPT_STRIDE + 1]
    mesh.core.supersede(client.request.spec.request_id, 2, mesh.now_s, "me")


def test_a_silent_attempt_is_retried() -> None:
    """An attempt without messages is retried after the watchdog's time, and not before."""
    mesh = mesh_of(2)
    client = begin(mesh)
    run(mesh, client, 10)
    (attempt,) = mesh.runs
    mesh.runs.remove(attempt)  # lost between two running processes
    assert attempt.router is not None
    attempt.router.runs.pop(attempt.slot)
    mesh.advance(14.0)
    assert len(client.request.attempts) == 1
    mesh.advance(1.5)
    assert [each.fault for each in client.request.attempts] == ["SILENT", ""]
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client)


def test_a_request_in_the_queue_is_not_silent() -> None:
    """The watchdog gives a request in a router's queue as long as the router may hold it."""
    mesh = mesh_of()
    client = begin(mesh)
    mesh.send_up(mesh.routers[0])
    mesh.arrive_up(mesh.routers[0])
    (attempt,) = mesh.runs
    mesh.work(attempt)
    assert attempt.stage == "accepted"
    mesh.send_down(mesh.routers[0])
    mesh.arrive_down(mesh.routers[0])
    mesh.advance(85.0)
    assert len(client.request.attempts) == 1
    mesh.advance(6.0)
    assert client.request.attempts[0].fault == "SILENT"


@pytest.mark.parametrize("has_empty_placement", [False, True])
def test_a_request_that_goes_back_into_the_queue_is_not_silent(has_empty_placement: bool) -> None:
    """After its replica's refusal, a requeued request gets the whole queue time again."""
    mesh = mesh_of()
    client = begin(mesh)
    (peer,) = mesh.core.peers
    (slot,) = peer.slots
    placed = pb.AttachResponse()
    placed.acceptances.add(slot=slot)
    placed.placements.add(slot=slot, prefill_replica="prefill-0", decode_replica="decode-0")
    mesh.core.on_response(peer.link, placed, mesh.now_s)
    back = pb.AttachResponse()
    if has_empty_placement:
        back.placements.add(slot=slot)
    else:
        back.acceptances.add(slot=slot)
    mesh.advance(5.0)
    mesh.core.on_response(peer.link, back, mesh.now_s)
    mesh.advance(85.0)
    assert len(client.request.attempts) == 1
    mesh.advance(6.0)
    assert client.request.attempts[0].fault == "SILENT"


def test_a_late_epoch_does_not_make_the_attempt_another_executions() -> None:
    """After a late epoch, an attempt begun here still counts against the request's executions."""
    mesh = mesh_of(attempts_max=2)
    client = begin(mesh, is_keyed=True, owner="me")
    run(mesh, client, 10)
    mesh.core.supersede(client.request.spec.request_id, 3, mesh.now_s, "me")
    assert client.request.spec.execution.attempt_base == 3 * ATTEMPT_STRIDE
    assert not client.request.upstream.is_anothers()
    for _ in range(2):
        client.request.upstream.detach()
        client.request.give_up_takeover(mesh.now_s)
    assert client.request.outcome is not None and client.request.outcome.name == "ATTEMPTS_EXHAUSTED"


def test_a_client_that_does_not_read_is_not_silent() -> None:
    """An attempt that filled its flow-control window waits for its client without a time limit."""
    mesh = mesh_of()
    client = Client(mesh.core, spec(LONG, max_output_tokens=200), mesh.now_s)
    for _ in range(300):
        mesh.settle()
    assert len(client.request.progress.ids) == client.request.progress.window_end == 64
    mesh.advance(100.0)
    assert len(client.request.attempts) == 1
    assert finish(mesh, client) == "END_TOKEN"
    assert len(client.request.attempts) == 1


def test_a_takeover_ends_at_the_limit_of_the_later_execution() -> None:
    """After a takeover the request ends at the output limit of the later execution.

    Without this rule the attempt would continue to its own limit, without window and messages.
    """
    mesh = mesh_of()
    first = begin(mesh)
    run(mesh, first, 10)
    second = moved(mesh, first, max_output_tokens=30)
    began_s = mesh.now_s
    assert finish(mesh, second) == "LENGTH"
    assert mesh.now_s - began_s < 1.0
    assert first.ids + second.ids == whole(first)[:30]
    mesh.settle()
    assert mesh.cancels == [pb.Cancel.REASON_COMPLETE] and not mesh.runs
