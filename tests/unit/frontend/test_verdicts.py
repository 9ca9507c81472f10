"""What a frontend makes of a replica's word on a request: test it once, wait for the test of another, or believe it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.frontend.requests.cross_check import CHECK_INTERVAL_S, WAIT_S
from services.frontend.requests.request_spec import NOBODY
from tests.unit.frontend.fake_mesh import TOKEN_BYTES, Client, FakeMesh, oracle, spec
from tests.unit.frontend.test_request import LONG, begin, end_of, finish, mesh_of, run, whole

INVALID, TOKEN = pb.Failure.CODE_INVALID, pb.Failure.CODE_INVALID_TOKEN


def refuse(mesh: FakeMesh, client: Client, code: pb.Failure.Code.ValueType = INVALID) -> None:
    """Let the client's running attempt end by a verdict that may be contested."""
    (attempt,) = [one for one in mesh.runs if one.submit.request_id == client.spec.request_id]
    mesh.fail(attempt, code, contestable=True)
    for router in mesh.routers:
        mesh.send_down(router)
        mesh.arrive_down(router)


def lose_verdict(mesh: FakeMesh) -> None:
    """Let the only attempt end by a verdict that may be contested, before any token."""
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    mesh.fail(mesh.runs[0], INVALID, contestable=True)
    for router in mesh.routers:
        mesh.send_down(router)
        mesh.arrive_down(router)


@pytest.mark.parametrize(("code", "outcome"), [(INVALID, "ENGINE_REFUSED"), (TOKEN, "ENGINE_ERROR")])
def test_two_replicas_that_agree_are_believed(code: pb.Failure.Code.ValueType, outcome: str) -> None:
    """The second attempt names the first replica; its own verdict ends the request, and routers hear of nothing."""
    mesh = mesh_of(2, retries=9.0)
    client = begin(mesh)
    run(mesh, client, 10)
    refuse(mesh, client, code)
    mesh.decode = "decode-1"
    run(mesh, client, 11)
    first, second = mesh.submits
    assert (list(first.contested_replicas), list(second.contested_replicas)) == ([], ["decode-0"])
    assert first.vocabulary_size == second.vocabulary_size == len(TOKEN_BYTES)
    assert second.start_position >= 10 and second.resumed
    assert mesh.core.verdicts.contradicted_total == 0, (
        "the first token of an attempt is of its prefill replica"
    )
    refuse(mesh, client, code)
    assert finish(mesh, client) == outcome
    assert mesh.core.verdicts.confirmed_total == 1 and not mesh.contradictions
    assert client.ids == whole(client)[: len(client.ids)]


def test_a_replica_that_is_contradicted_is_told_of_to_all_routers() -> None:
    """The second replica's own token shows it: each router hears once, and the request ends well."""
    mesh = mesh_of(3, retries=9.0)
    client = begin(mesh)
    run(mesh, client, 10)
    refuse(mesh, client)
    mesh.decode = "decode-1"
    assert finish(mesh, client) == "LENGTH"
    mesh.settle()
    assert client.ids == whole(client)
    assert sorted(mesh.contradictions) == [(f"router-{number}", "decode-0") for number in range(3)]


def test_a_verdict_before_any_token_is_contested_under_the_same_limits() -> None:
    """Nothing was generated: the second attempt has no privilege of a resumed one. Behind tokens it has, see above.

    A replica keeps no headroom free beside a resumed attempt, and a full mesh does not refuse it.
    """
    mesh = mesh_of(retries=9.0)
    client = begin(mesh)
    lose_verdict(mesh)
    mesh.decode = "decode-1"
    mesh.settle()
    assert [(row.resumed, list(row.contested_replicas)) for row in mesh.submits] == [
        (False, []),
        (False, ["decode-0"]),
    ]
    retry_state = client.request.retry_state
    assert (retry_state.retries, retry_state.resumes, retry_state.executions_left) == (1, 0, 2)
    mesh.refuse(mesh.runs[0], pb.Refusal.REASON_KV_FULL)
    assert finish(mesh, client) == "KV_FULL"


def test_tokens_that_only_the_client_knows_of_make_no_resume() -> None:
    """A client may make them up: a contested attempt behind them has the limits of the first."""
    mesh = mesh_of(retries=9.0)
    named = replace(NOBODY, tenant=replace(NOBODY.tenant, name="a"))
    begin(mesh, received_ids=tuple(oracle(spec(LONG).prompt_ids, 5)), is_resumed=True, caller=named)
    lose_verdict(mesh)
    mesh.decode = "decode-1"
    mesh.settle()
    assert [(row.start_position, row.resumed) for row in mesh.submits] == [(5, False), (5, False)]


def test_what_a_replica_refuses_by_its_limits_is_final() -> None:
    """Headroom, KV blocks and sequence length are facts of the replica, whatever an earlier router says of contesting."""
    mesh = mesh_of(2, retries=9.0)
    client = begin(mesh)
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    (attempt,) = mesh.runs
    assert attempt.router is not None
    row = pb.Refusal(
        slot=attempt.slot,
        reason=pb.Refusal.REASON_INVALID,
        message="5 KV blocks are needed beside 8 of headroom; 10 exist",
        field="token_ids",
        replica="decode-0",
        contestable=True,
    )
    attempt.router.downward.append(pb.AttachResponse(refusals=[row]))
    mesh.arrive_down(attempt.router)
    mesh.decode = "decode-1"
    assert finish(mesh, client) == "ENGINE_REFUSED"
    mesh.settle(3)
    assert len(mesh.submits) == 1 and not mesh.contradictions
    assert mesh.core.verdicts.cross_checks_total == 0


def test_a_replica_that_repeats_its_verdict_does_not_confirm_it() -> None:
    """A router placed the second attempt at the first replica again: its own word is no second one."""
    mesh = mesh_of(retries=9.0)
    client = begin(mesh)
    run(mesh, client, 5)
    refuse(mesh, client)
    mesh.settle()
    refuse(mesh, client)
    known = mesh.core.verdicts
    assert (known.cross_checks_total, known.confirmed_total) == (2, 0)
    mesh.decode = "decode-1"
    assert finish(mesh, client) == "LENGTH"
    assert known.contradicted_total == 1 and client.ids == whole(client)


def test_a_router_that_knows_no_other_replica_makes_the_word_final() -> None:
    """Also a router of the release before, which does not know the question."""
    mesh = mesh_of(retries=9.0)
    client = begin(mesh)
    run(mesh, client, 5)
    mesh.fail(mesh.runs[0], INVALID)
    assert finish(mesh, client) == "ENGINE_REFUSED"
    assert len(mesh.submits) == 1


@pytest.mark.parametrize(("attempts_max", "retries"), [(4, 0.0), (1, 9.0)])
def test_without_budget_or_executions_the_first_word_is_final(attempts_max: int, retries: float) -> None:
    """It counts nothing."""
    mesh = mesh_of(attempts_max=attempts_max, retries=retries)
    client = begin(mesh)
    run(mesh, client, 5)
    refuse(mesh, client)
    assert finish(mesh, client) == "ENGINE_REFUSED"
    assert len(mesh.submits) == 1 and not mesh.contradictions
    assert mesh.core.verdicts.unpaid_total == (attempts_max > 1)
    assert mesh.core.retries.refused_total == 0, "no retry was refused: nothing was lost"


def spend_all(mesh: FakeMesh) -> None:
    """Leave the budget nothing to spare."""
    while mesh.core.retries.take_spare(mesh.now_s):
        pass


def two_refused() -> tuple[FakeMesh, Client, Client]:
    """Return a mesh whose budget paid for the first client's verdict and not for the second one's, which waits."""
    mesh = mesh_of(retries=0.3)
    tested, waiting = begin(mesh), Client(mesh.core, spec(7, max_output_tokens=60), mesh.now_s)
    run(mesh, tested, 3)
    run(mesh, waiting, 3)
    refuse(mesh, tested)
    spend_all(mesh)
    refuse(mesh, waiting)
    assert not tested.is_done and not waiting.is_done
    return mesh, tested, waiting


def test_a_verdict_waits_while_another_of_its_replica_is_tested() -> None:
    """The first contradiction frees it, without the budget."""
    mesh, _, waiting = two_refused()
    mesh.decode = "decode-1"
    assert finish(mesh, waiting) == "LENGTH"
    assert waiting.ids == whole(waiting)


def test_a_verdict_that_waits_in_vain_is_final() -> None:
    """WAIT_S without a result, and no budget: the first word holds."""
    mesh, _, waiting = two_refused()
    mesh.advance(WAIT_S - 2 * CHECK_INTERVAL_S)
    waiting.read(mesh.now_s)
    assert not waiting.is_done
    spend_all(mesh)
    mesh.advance(3 * CHECK_INTERVAL_S)
    waiting.read(mesh.now_s)
    assert end_of(waiting).reason == "ENGINE_REFUSED"
    mesh.core.assert_consistent()


def test_a_confirmed_verdict_lets_none_wait() -> None:
    """Where two replicas just agreed, a verdict without budget is final at once."""
    mesh, tested, waiting = two_refused()
    mesh.decode = "decode-1"
    run(mesh, tested, len(tested.ids) + 1)
    refuse(mesh, tested)
    mesh.advance(2 * CHECK_INTERVAL_S)
    waiting.read(mesh.now_s)
    assert end_of(waiting).reason == "ENGINE_REFUSED"


def test_a_client_that_leaves_while_its_verdict_waits_leaves_nothing() -> None:
    """Neither the one whose attempt tests a verdict, nor the one that waits for it."""
    mesh, tested, waiting = two_refused()
    mesh.core.leave(tested.request, mesh.now_s)
    mesh.core.leave(waiting.request, mesh.now_s)
    mesh.core.assert_consistent()
    assert not mesh.core.verdicts.is_undecided("decode-0", mesh.now_s)
    mesh.advance(WAIT_S)
    assert not mesh.core.admitted.serving and not mesh.core.admitted.leaving
