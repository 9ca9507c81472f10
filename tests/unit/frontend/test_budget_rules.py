"""Budgets at the frontend's core: budget fields, refusals, retries, Retry-After and bills."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.buckets.limits import Account
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts import bill
from services.frontend.requests import faults, feasibility
from services.frontend.requests.admitted import AdmittedRequests
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.feasibility import FirstTokens, Outlook
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RUNTIME_GRACE_S
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.surface import wire
from tests.unit.frontend.fake_mesh import Client, FakeMesh, spec

ROOM = pb.Refusal


def caller(name: str = "search", *, sheddable: bool = False) -> Caller:
    return Caller(
        tenant=Tenant(name=name, weight=3.0),
        service_class=ServiceClass(
            name="quick",
            priority_class=6,
            runtime_max_s=30.0,
            default_deadline_s=30.0,
            max_output_tokens=1000,
            is_sheddable=sheddable,
            kv_headroom=0.125,
        ),
        account=Account(name, ()),
    )


def mesh_of(retries: RetryBudget | None = None, start_min_s: float = 0.0) -> FakeMesh:
    core = FrontendCore(
        Limits(4, 3.0, 4, start_min_s=start_min_s),
        limit=10_000,
        retries=retries or RetryBudget(0.1, 3.0, 1000.0),
        jitter=lambda: 0.5,
    )
    mesh = FakeMesh(core, random.Random(1), 1)
    mesh.open(mesh.routers[0])
    return mesh


def begin(mesh: FakeMesh, at: int = 1, **changes: Any) -> Client:
    values = {"max_output_tokens": 60, "deadline_s": mesh.now_s + 600, **changes}
    return Client(mesh.core, spec(at, **values), mesh.now_s)


def refuse(mesh: FakeMesh, slot: int, reason: int, **row: Any) -> None:
    message = pb.AttachResponse()
    message.refusals.add(slot=slot, reason=reason, **row)
    mesh.core.on_response(mesh.routers[0], message, mesh.now_s)
    mesh.core.assert_consistent()


def sent(mesh: FakeMesh) -> list[pb.Submit]:
    message = mesh.routers[0].outbox.take(mesh.now_s)
    return list(message.submits) if message is not None else []


def error_of(client: Client) -> MeshError:
    assert client.request.outcome is not None and client.request.outcome.error is not None
    return client.request.outcome.error


def test_submits_carry_the_callers_budget_and_a_grace_for_the_class_deadline() -> None:
    """A submit carries the caller's budget, with a grace where the deadline is the class's.

    Without the grace, margins of later hops would cut the class's runtime. A client's own deadline gets no
    grace.
    """
    for is_clients, grace_s in ((True, 0.0), (False, RUNTIME_GRACE_S)):
        mesh = mesh_of()
        deadline_s = mesh.now_s + 30
        begin(
            mesh, caller=caller(), deadline_s=deadline_s, is_clients_deadline=is_clients, reservation_id="r-1"
        )
        (submit,) = sent(mesh)
        budget = submit.budget
        assert (budget.tenant, budget.service_class, budget.band, budget.weight) == (
            "search",
            "quick",
            6,
            3.0,
        )
        assert (budget.kv_head_room_permille, budget.sheddable, budget.reservation_id) == (125, False, "r-1")
        assert abs(budget.remaining_ms - (30 + grace_s) * 1000) <= 1


def test_a_request_without_time_never_reaches_a_router() -> None:
    """A request with too little time is refused before it is sent, at the first attempt and at a retry."""
    mesh = mesh_of(start_min_s=0.1)
    late = begin(mesh, 1, deadline_s=mesh.now_s + 0.05)
    assert error_of(late).reason == "INFEASIBLE_DEADLINE"
    told = error_of(late)
    assert told.metadata == {"start_min_ms": "100", "remaining_ms": "50", "tokens_sent": "0"} and not sent(
        mesh
    )
    assert "at least 0.100 s needed (frontend.start_min_s)" in told.message
    assert "estimated" not in told.message
    again = begin(mesh, 2, deadline_s=mesh.now_s + 1.0)
    (submit,) = sent(mesh)
    mesh.now_s += 0.95
    refuse(mesh, submit.slot, ROOM.REASON_NO_REPLICA)
    mesh.now_s += 0.04
    mesh.core.on_timer(mesh.now_s)
    assert error_of(again).reason == "INFEASIBLE_DEADLINE" and not sent(mesh)


def test_a_measured_estimate_is_reported_if_above_the_minimum() -> None:
    """An infeasible deadline is refused with the estimate, if the estimate is above the minimum.

    With only the minimum, the client would be refused again because of its prompt's time.
    """
    for estimate_s, said in ((0.0, {"start_min_ms": "100"}), (0.06, {"start_min_ms": "100"})):
        assert faults.too_short(0.05, 0.1, estimate_s).metadata.items() >= said.items()
        assert "estimate_ms" not in faults.too_short(0.05, 0.1, estimate_s).metadata
    assert faults.too_short(0.05, 0.1, 0.75).metadata["estimate_ms"] == "750"
    assert faults.too_short(0.0999, 0.1).metadata["remaining_ms"] == "99", (
        "rounded down, so below the minimum"
    )
    assert Outlook(queue_delay_s=2.0).until_first_token_s == 0.0, "no estimate from the queue delay alone"
    assert Outlook(queue_delay_s=2.0, first_token_s=0.5).until_first_token_s == 2.5


def test_a_routers_infeasible_deadline_is_final_and_states_its_estimate() -> None:
    """A router's refusal for the deadline is final; its estimate and Retry-After reach the client."""
    mesh = mesh_of()
    client = begin(mesh, deadline_s=mesh.now_s + 2.0)
    (submit,) = sent(mesh)
    refuse(mesh, submit.slot, ROOM.REASON_DEADLINE, estimate_ms=3500, retry_after_ms=700)
    error = error_of(client)
    assert (error.reason, error.metadata["estimate_ms"], error.retry_after_s) == (
        "INFEASIBLE_DEADLINE",
        "3500",
        0.7,
    )
    assert int(error.metadata["remaining_ms"]) == 2000
    assert not sent(mesh) and mesh.core.retries.spent_total == 0


def test_a_resume_within_its_class_deadline_is_not_ended_by_an_estimate() -> None:
    """A resumed request is retried until its class's deadline despite a router's estimate.

    The request keeps its tokens.
    """
    mesh = mesh_of()
    client = begin(mesh, deadline_s=mesh.now_s + 5.0, is_clients_deadline=False)
    mesh.settle(6)
    client.read(mesh.now_s)
    assert client.ids
    until_s = client.spec.timing.deadline_s
    mesh.cut(mesh.routers[0])
    mesh.runs.clear()
    mesh.open(mesh.routers[0])
    refusals = 0
    while client.request.outcome is None and mesh.now_s < until_s + 1:
        router = mesh.routers[0]
        message = router.outbox.take(mesh.now_s)
        for adopt in message.adopts if message is not None else ():
            refuse(mesh, adopt.slot, ROOM.REASON_UNKNOWN_REQUEST)
        for submit in message.submits if message is not None else ():
            refuse(mesh, submit.slot, ROOM.REASON_DEADLINE, estimate_ms=9000)
            refusals += 1
        mesh.now_s += 0.01
        mesh.core.on_timer(mesh.now_s)
    assert client.request.outcome is not None
    assert client.request.outcome.finish_reason == inference_pb2.FINISH_REASON_DEADLINE
    assert until_s <= mesh.now_s <= until_s + 0.05 and 1 < refusals < 20


@pytest.mark.parametrize(
    ("reason", "evicted", "told"),
    [
        (ROOM.REASON_QUEUE_FULL, False, "QUEUE_FULL"),
        (ROOM.REASON_QUEUE_FULL, True, "SHED"),
        (ROOM.REASON_QUEUE_TIMEOUT, False, "QUEUE_TIMEOUT"),
        (ROOM.REASON_KV_FULL, False, "KV_FULL"),
    ],
)
def test_a_full_mesh_is_not_tried_again(reason: int, evicted: bool, told: str) -> None:
    """A refusal for load is not retried, and the router's Retry-After reaches the client."""
    mesh = mesh_of()
    client = begin(mesh)
    (submit,) = sent(mesh)
    refuse(mesh, submit.slot, reason, retry_after_ms=1500, evicted=evicted)
    assert (error_of(client).reason, error_of(client).retry_after_s) == (told, 1.5)
    assert not sent(mesh) and mesh.core.retries.spent_total == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("frontends", [1, 4])
def test_with_half_of_the_replicas_gone_retries_stay_a_tenth(seed: int, frontends: int) -> None:
    """With half of all attempts failing, retries stay within the retry budget.

    The bound is 1.1 times the requests, and the trickle of the whole mesh.
    """
    draw, seconds, per_s = random.Random(seed), 20, 100
    budgets = [RetryBudget(0.1, 3.0, 1000.0) for _ in range(frontends)]
    submits = requests = 0
    for budget in budgets:
        budget.share(frontends, 1000.0)
        mesh = mesh_of(budget)
        for at in range(seconds * per_s):
            mesh.now_s = 1000.0 + at / per_s
            mesh.core.on_timer(mesh.now_s)
            begin(mesh, at + 1, max_output_tokens=1)
            requests += 1
            for submit in sent(mesh):
                submits += 1
                if draw.random() < 0.5:
                    refuse(mesh, submit.slot, ROOM.REASON_NO_REPLICA)
                else:
                    message = pb.AttachResponse()
                    message.first_tokens.add(slot=submit.slot, position=0, token_id=5)
                    message.finishes.add(slot=submit.slot, end_position=1, reason=pb.Finish.REASON_LENGTH)
                    mesh.core.on_response(mesh.routers[0], message, mesh.now_s)
    saved = 10 * 3.0
    assert submits <= 1.1 * requests + 3.0 * seconds + saved + frontends
    assert submits >= 1.05 * requests, "permitted retries are made"


def test_sheddable_requests_leave_half_of_the_retries_to_others() -> None:
    """Sheddable requests use at most half of the retry budget."""
    budget = RetryBudget(0.1, 3.0, 0.0)
    assert sum(budget.take(0.0, is_sheddable=True) for _ in range(100)) < 15
    assert sum(budget.take(0.0) for _ in range(100)) >= 15


def test_clients_refused_together_get_different_retry_after_values() -> None:
    """Refused clients get staggered Retry-After values: slots become free at the rate at which requests end."""
    core = mesh_of().core
    live = AdmittedRequests(2)
    ends = [begin(mesh_of(), at) for at in range(1, 40)]
    assert core is not None
    now_s = 50.0
    for client in ends:  # ten requests end a second
        live.limit = 100
        live.admit(client.request, now_s)
        now_s += 0.1
        live.end(client.request, now_s)
    live.limit = 0
    told = []
    for _ in range(20):
        with pytest.raises(MeshError) as caught:
            live.check_capacity(now_s)
        assert caught.value.retry_after_s is not None
        told.append(caught.value.retry_after_s)
    gaps = [later - earlier for earlier, later in pairwise(told)]
    assert all(0.09 <= gap <= 0.11 for gap in gaps), gaps
    for _ in range(1000):
        with pytest.raises(MeshError) as caught:
            live.check_capacity(now_s)
    assert caught.value.retry_after_s == 10.0


def test_an_idle_hour_does_not_change_the_retry_after() -> None:
    """An idle hour does not change the estimated drain rate of a full frontend."""
    live, now_s = AdmittedRequests(4), 50.0
    requests = [begin(mesh_of(), at).request for at in range(1, 5)]
    for idle_s in (0.0, 3600.0):
        for request in requests:
            live.admit(request, now_s)
        for number in range(40):  # each request takes 0.4 s: ten end a second
            now_s += 0.1
            live.end(requests[number % 4], now_s)
            live.forget(requests[number % 4])
            live.admit(requests[number % 4], now_s)
        for request in requests:
            live.end(request, now_s)
            live.forget(request)
        now_s += idle_s
    for request in requests:
        live.admit(request, now_s)
    with pytest.raises(MeshError) as caught:
        live.check_capacity(now_s)
    assert caught.value.retry_after_s == pytest.approx(0.1, rel=0.2)


@given(
    st.floats(0, 100),
    st.integers(0, 50),
    st.integers(1, 1000),
    st.floats(0, 1),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_a_clamp_is_between_one_token_and_the_requested_maximum(
    left_s: float, received: int, wanted: int, step_s: float, queue_s: float, first_s: float
) -> None:
    """The output limit fits the remaining time, and is between one more token and the request's maximum."""
    wanted = max(wanted, received + 1)
    tokens = feasibility.output_tokens(left_s, received, wanted, Outlook(queue_s, step_s, first_s))
    assert received + 1 <= tokens <= wanted
    if step_s < feasibility.STEP_MIN_S:
        assert tokens == wanted
    elif tokens > received + 1:
        assert queue_s + first_s + (tokens - received) * step_s <= left_s * (1 + 1e-9)


def test_the_outlook_combines_the_last_report_and_observations() -> None:
    """The outlook combines the router's last load report with the observed time to first token.

    Without a report it is 0. The router's queue delay is not counted twice.
    """
    mesh = mesh_of()
    assert mesh.core.outlook("s", 4, 100, mesh.now_s) == Outlook(0.0, 0.0, 0.0)
    message = pb.AttachResponse(load_report=pb.LoadReport(queue_delay_us=250_000, step_p95_us=21_000))
    mesh.core.on_response(mesh.routers[0], message, mesh.now_s)
    client = begin(mesh, 1, arrived_s=mesh.now_s, max_output_tokens=1)
    (submit,) = sent(mesh)
    rows = pb.AttachResponse()
    rows.placements.add(slot=submit.slot, decode_replica="decode-0", queue_us=400_000)
    rows.first_tokens.add(slot=submit.slot, token_id=5)
    rows.finishes.add(slot=submit.slot, end_position=1, reason=pb.Finish.REASON_LENGTH)
    mesh.core.on_response(mesh.routers[0], rows, mesh.now_s + 0.5)
    assert client.request.outcome is not None
    size = client.request.spec.prompt_tokens
    outlook = mesh.core.outlook("s", 4, size, mesh.now_s)
    assert (outlook.queue_delay_s, outlook.step_s) == (0.25, 0.021)
    assert outlook.first_token_s == pytest.approx(0.2), (
        "0.1 s without the queue delay, and as much for the spread"
    )
    assert mesh.core.outlook("s", 7, size, mesh.now_s).queue_delay_s == 0, (
        "the queue delay of a lower priority class does not count"
    )


def test_first_tokens_are_expected_with_their_spread() -> None:
    """The expected time to first token includes its spread, and is 0 before the first observation."""
    steady, straying = FirstTokens(), FirstTokens()
    assert steady.expected_s(100, 0) == 0
    for at in range(200):
        steady.observe(100, 0.1, at)
        straying.observe(100, 0.05 + 0.1 * (at % 2), at)
    assert steady.expected_s(100, 200) == pytest.approx(0.1, rel=0.01)
    assert straying.expected_s(100, 200) > 0.15


def test_first_tokens_that_were_late_do_not_cut_the_outputs_of_others() -> None:
    """A single late first token hardly changes the expected time to first token.

    Long prompts do not affect short ones. Old observations expire.
    """
    seen = FirstTokens()
    for at in range(100):
        seen.observe(100, 0.2, at)
        seen.observe(50_000, 9.0, at)
    seen.observe(100, 30.0, 100)
    assert seen.expected_s(100, 100) < 0.4 and seen.expected_s(50_000, 100) > 8
    for at in range(100):
        seen.observe(100, 5.0, 100 + at)
    assert seen.expected_s(100, 200) == pytest.approx(5.0, rel=0.1), "delays of all requests are learnt"
    assert seen.expected_s(100, 300) == 0


@given(st.data())
def test_a_resume_token_is_always_recognised(data: st.DataObject) -> None:
    """A request with a resume token is always recognised, without parsing the message."""
    request = inference_pb2.GenerateRequest(text=data.draw(st.text(max_size=300)))
    if data.draw(st.booleans()):
        request.limits.max_output_tokens = 5
    has_options = data.draw(st.booleans())
    if has_options:
        request.options.resume.resume_token = b"x"
    if data.draw(st.booleans()):
        request.idempotency_key = "key"
    encoded = request.SerializeToString()
    assert wire.may_resume(encoded) == has_options
    cut = encoded[: data.draw(st.integers(0, len(encoded)))]
    wire.may_resume(cut)  # returns for any prefix


def ended(mesh: FakeMesh, client: Client) -> bill.Bill:
    assert client.request.outcome is not None
    return bill.of(client.request)


def test_bills_by_how_a_request_ends() -> None:
    """A bill depends on how the request ended.

    Complete: prompt and output. Left after the prompt: the prompt and the output sent. Never begun, or an
    internal error: nothing.
    """
    mesh = mesh_of()
    whole = begin(mesh, 1, max_output_tokens=8)
    for _ in range(40):
        mesh.settle(1)
        whole.read(mesh.now_s)
    assert ended(mesh, whole).is_complete and ended(mesh, whole).output_tokens == len(whole.ids)
    assert ended(mesh, whole).prompt_tokens == whole.spec.prompt_tokens

    queued = begin(mesh, 2)
    mesh.core.leave(queued.request, mesh.now_s)
    assert ended(mesh, queued).is_nothing and ended(mesh, queued).is_request_refunded

    left = begin(mesh, 5)
    while not left.ids:
        mesh.settle(1)
        left.read(mesh.now_s)
    mesh.core.leave(left.request, mesh.now_s)
    paid = ended(mesh, left)
    assert (paid.prompt_tokens, paid.output_tokens) == (left.spec.prompt_tokens, len(left.ids))
    assert not paid.is_request_refunded and not paid.is_complete

    lost = begin(mesh, 4)
    failed: LiveRequest = lost.request
    failed.on_bug(mesh.now_s)
    assert ended(mesh, lost) == bill.NOT_STARTED
