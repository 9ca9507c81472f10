"""Cross-check of a replica's verdict on a second replica: test it, wait for another's test, or believe it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.frontend.requests.cross_check import CHECK_INTERVAL_S, WAIT_S
from services.frontend.requests.request_spec import NOBODY
from tests.unit.frontend.fake_mesh import TOKEN_BYTES, Client, FakeMesh, oracle, spec
from tests.unit.frontend.test_request import LONG, begin, end_of, finish, mesh_of, run, whole

INVALID, TOKEN = pb.Failure.CODE_INVALID, pb.Failure.CODE_INVALID_TOKEN


def refuse(
    mesh: FakeMesh, client: Client, code: pb.Failure.Code.ValueType = INVALID, message: str = "broke"
) -> None:
    """End the client's running attempt with a contestable verdict."""
    (attempt,) = [one for one in mesh.runs if one.submit.request_id == client.spec.request_id]
    mesh.fail(attempt, code, message, contestable=True)
    for router in mesh.routers:
        mesh.send_down(router)
        mesh.arrive_down(router)


def lose_verdict(mesh: FakeMesh) -> None:
    """End the only attempt with a contestable verdict, before any token."""
    for router in mesh.routers:
        mesh.send_up(router)
        mesh.arrive_up(router)
    mesh.fail(mesh.runs[0], INVALID, contestable=True)
    for router in mesh.routers:
        mesh.send_down(router)
        mesh.arrive_down(router)


@pytest.mark.parametrize(("code", "outcome"), [(INVALID, "ENGINE_REFUSED"), (TOKEN, "ENGINE_ERROR")])
def test_two_replicas_that_agree_are_believed(code: pb.Failure.Code.ValueType, outcome: str) -> None:
    """A verdict that a second replica confirms ends the request and is not reported to routers.

    The second attempt names the first replica.
    """
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
    assert mesh.core.verdicts.contradicted_total == 0, "the prefill replica makes an attempt's first token"
    refuse(mesh, client, code)
    assert finish(mesh, client) == outcome
    assert mesh.core.verdicts.confirmed_total == 1 and not mesh.contradictions
    assert client.ids == whole(client)[: len(client.ids)]


def test_a_contradicted_replica_is_reported_to_all_routers() -> None:
    """A token of the second replica contradicts the verdict; each router is told once.

    The request ends well.
    """
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
    """A cross-check before any token has the limits of a first attempt.

    No token was generated, so the second attempt has no privilege of a resumed one. A replica keeps no
    headroom free beside a resumed attempt, and a full mesh does not refuse it. The test above covers attempts
    behind tokens.
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


def test_tokens_that_only_the_client_claims_make_no_resume() -> None:
    """A cross-check behind tokens that only the client claims has the limits of a first attempt."""
    mesh = mesh_of(retries=9.0)
    named = replace(NOBODY, tenant=replace(NOBODY.tenant, name="a"))
    begin(mesh, received_ids=tuple(oracle(spec(LONG).prompt_ids, 5)), is_resumed=True, caller=named)
    lose_verdict(mesh)
    mesh.decode = "decode-1"
    mesh.settle()
    assert [(row.start_position, row.resumed) for row in mesh.submits] == [(5, False), (5, False)]


def test_a_refusal_by_a_replicas_limits_is_final() -> None:
    """A refusal by a replica's limits is final, also when an earlier router marks it contestable.

    Headroom, KV blocks and sequence length are facts of the replica.
    """
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
    """A verdict repeated by the same replica does not confirm it.

    A router may place the second attempt at the first replica again.
    """
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


def test_a_verdict_is_final_if_the_router_knows_no_other_replica() -> None:
    """Without the contestable mark, a verdict is final.

    A router sends no mark if it knows no other replica, or if it is of the release before.
    """
    mesh = mesh_of(retries=9.0)
    client = begin(mesh)
    run(mesh, client, 5)
    mesh.fail(mesh.runs[0], INVALID)
    assert finish(mesh, client) == "ENGINE_REFUSED"
    assert len(mesh.submits) == 1


@pytest.mark.parametrize(("attempts_max", "retries"), [(4, 0.0), (1, 9.0)])
def test_without_budget_or_executions_the_first_verdict_is_final(attempts_max: int, retries: float) -> None:
    """Without retry budget or executions left, the first verdict is final and counts as no lost retry."""
    mesh = mesh_of(attempts_max=attempts_max, retries=retries)
    client = begin(mesh)
    run(mesh, client, 5)
    refuse(mesh, client)
    assert finish(mesh, client) == "ENGINE_REFUSED"
    assert len(mesh.submits) == 1 and not mesh.contradictions
    assert mesh.core.verdicts.unpaid_total == (attempts_max > 1)
    assert mesh.core.retries.refused_total == 0, "no retry was refused, since no attempt was lost"


def spend_all(mesh: FakeMesh) -> None:
    """Spend all of the budget that may be spared."""
    while mesh.core.retries.take_spare(mesh.now_s):
        pass


def two_refused() -> tuple[FakeMesh, Client, Client]:
    """Return a mesh with a retry budget that paid for the first client's cross-check only; the second
    client's verdict waits.
    """
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
    """A waiting verdict is released by the first contradiction of its replica, without retry budget."""
    mesh, _, waiting = two_refused()
    mesh.decode = "decode-1"
    assert finish(mesh, waiting) == "LENGTH"
    assert waiting.ids == whole(waiting)


def test_a_verdict_that_waits_too_long_is_final() -> None:
    """A verdict that waits for WAIT_S without a result or budget is final."""
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
    """Right after two replicas agreed, a verdict without budget is final at once."""
    mesh, tested, waiting = two_refused()
    mesh.decode = "decode-1"
    run(mesh, tested, len(tested.ids) + 1)
    refuse(mesh, tested)
    mesh.advance(2 * CHECK_INTERVAL_S)
    waiting.read(mesh.now_s)
    assert end_of(waiting).reason == "ENGINE_REFUSED"


def test_a_client_that_leaves_while_its_verdict_waits_leaves_nothing() -> None:
    """A client that leaves during a cross-check, or while it waits for one, leaves nothing behind."""
    mesh, tested, waiting = two_refused()
    mesh.core.leave(tested.request, mesh.now_s)
    mesh.core.leave(waiting.request, mesh.now_s)
    mesh.core.assert_consistent()
    assert not mesh.core.verdicts.is_undecided("decode-0", mesh.now_s)
    mesh.advance(WAIT_S)
    assert not mesh.core.admitted.serving and not mesh.core.admitted.leaving


@pytest.mark.parametrize(
    ("message", "field"), [("guided_decoding_guide: no rule", "sampling.guide"), ("no", "")]
)
def test_a_refusal_of_the_engine_names_the_guide(message: str, field: str) -> None:
    """The engine alone compiles the guide with its vocabulary. Its own words are not shown."""
    mesh = mesh_of(2, retries=9.0)
    client = begin(mesh)
    for decode, tokens in (("decode-0", 10), ("decode-1", 11)):
        mesh.decode = decode
        run(mesh, client, tokens)
        refuse(mesh, client, INVALID, message)
    assert finish(mesh, client) == "ENGINE_REFUSED"
    outcome = client.request.outcome
    error = outcome.error if outcome is not None else None
    assert error is not None and error.metadata.get("field", "") == field
    assert (f"refuses {field} of" in error.message) == bool(field) and "no rule" not in error.message
