"""Commands of operators: what they change, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from controlplane.command_queue import Author
from controlplane.operators import Operators
from controlplane.rollouts import transitions
from controlplane.rollouts.commands import CommandRefused
from controlplane.rollouts.document import RolloutDocument
from controlplane.shadow_operators import ShadowOperators
from controlplane.snapshots.desired import CordonEntry, Desired
from kvmesh.cli.control.stable_content import all_to_stable
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import shadow_pb2 as shadow_pb
from kvmesh.errors import MeshError
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, Track
from kvmesh.snapshot.published import Term, publish
from tests.unit.controlplane.test_core import Driver
from tests.unit.controlplane.test_takeover import CALM, baking, content_of

NOBODY = Author()
PAUSE = pb.ChangeRolloutRequest.CHANGE_PAUSE
ATTEST = pb.ChangeRolloutRequest.CHANGE_ATTEST


def operators_of(driver: Driver) -> Operators:
    return Operators(driver.core, lambda: 5000.0)


def test_all_to_stable_leaves_a_pool_that_is_not_configured_any_more() -> None:
    """Else nothing could: a rollout needs its old pool. All traffic at once needs force."""
    gone = Content((PoolTrack("gone", "v0", Track.STABLE, 100), PoolTrack("stable", "v1")))
    driver = Driver(board=publish(Term(3, "control-9"), 1, gone))
    driver.lead()
    assert driver.core.content.stable.pool == "gone"
    operators = operators_of(driver)
    with pytest.raises(CommandRefused, match="100 points") as refused:
        operators.revert(pb.RevertSnapshotRequest(to="stable"), NOBODY, None).run(0.0, driver.core.library)
    assert refused.value.can_force
    prepared = operators.revert(pb.RevertSnapshotRequest(to="stable", force=True), NOBODY, None)
    driver.core.command(prepared.command(1, NOBODY, driver.core.library), driver.now_s)
    driver.perform()
    assert driver.done == {1: ""} and driver.core.content.stable.pool == "stable"


def test_no_command_moves_users_to_another_model() -> None:
    """Neither a rollout, nor a shadow, nor a revert to a snapshot of the time when the pool served their model."""
    driver = Driver(models={"v1": "chat", "v2": "code"})
    driver.lead()
    operators, shadows = operators_of(driver), ShadowOperators(driver.core, lambda: 5000.0)
    to_next = pb.RolloutSettings(to_pool="next")
    with pytest.raises(
        MeshError, match=r'to_pool is "next", which serves the model "code"; .* allowed: stable'
    ):
        operators.start(pb.StartRolloutRequest(settings=to_next, force=True), NOBODY, "r-1")
    request = shadow_pb.StartShadowRequest()
    request.settings.to_pool, request.settings.sample_permille, request.settings.token_max = "next", 10, 9000
    with pytest.raises(MeshError, match=r'to_pool is "next", which serves the model "code"; a pool of the'):
        shadows.start(request, NOBODY, "s-1")
    of_next = replace(CALM, pools=(PoolTrack("next", "v2", Track.STABLE, 100), PoolTrack("stable", "v1")))
    past = publish(Term(3, "control-9"), 1, of_next)
    revert = operators.revert(pb.RevertSnapshotRequest(to=str(past.name), force=True), NOBODY, past)
    with pytest.raises(CommandRefused, match=r'"next" of snapshot .* serves the model "code" now') as refused:
        revert.run(0.0, driver.core.library)
    assert not refused.value.can_force
    alike = operators_of(Driver(models={"v1": "chat", "v2": "chat"}))
    alike.start(pb.StartRolloutRequest(settings=to_next, force=True), NOBODY, "r-1")


def test_all_to_stable_leaves_a_promoted_pool_stable() -> None:
    """As `--direct` does. Undo alone swaps it back, because it looks at the old pool first."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    driver = Driver(promoted, board=publish(Term(3, "control-9"), 1, content_of(promoted)))
    driver.lead()
    request = pb.RevertSnapshotRequest(to="stable", force=True)
    with pytest.raises(CommandRefused, match='"next" is stable already; `kvmesh rollout undo`') as refused:
        operators_of(driver).revert(request, NOBODY, None).run(0.0, driver.core.library)
    assert not refused.value.can_force
    direct = all_to_stable(driver.core.content, 0)
    assert direct.stable.pool == driver.core.content.stable.pool == "next" and not direct.ended_rollouts


def test_a_revert_puts_no_drain_of_the_earlier_snapshot_back() -> None:
    """A drain needs a mesh without a freeze and a peer of its role. The cordons of the present stay."""
    drains = tuple(Cordon(f"stable-{role}-0", "b", is_draining=True) for role in ("prefill", "decode"))
    past = publish(Term(3, "control-9"), 1, replace(CALM, cordons=drains))
    driver = Driver()
    driver.lead()
    kept = CordonEntry(process_id="next-decode-0", reason="disk")
    driver.core.library.adopt(Desired(revision=1, cordons=(kept,), frozen_until_s=9000.0))
    request = pb.RevertSnapshotRequest(to=str(past.name))
    made = operators_of(driver).revert(request, NOBODY, past).run(0.0, driver.core.library)
    assert isinstance(made, Desired) and made.cordons == (kept,)
    assert (made.stable_pool, made.frozen_until_s) == ("stable", 9000.0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reason": "x" * 201}, "reason is 201 characters; up to 200 characters are allowed"),
        ({"by": "x" * 201}, "by is 201 characters; up to 200 characters are allowed"),
        ({"change": 99}, "change is 99; pause, resume, promote, abort, undo, attest are allowed"),
        ({"rollout": "r-9"}, 'rollout is "r-9"; no rollout has that name; '),
        (
            {"change": ATTEST, "requirement": "evals"},
            'requirement is "evals"; this rollout requires: none',
        ),
    ],
)
def test_a_bad_change_is_refused_with_field_value_and_range(fields: dict[str, Any], text: str) -> None:
    """Nothing is cut off in silence."""
    driver = Driver(baking(1, 10))
    driver.lead()
    with pytest.raises(MeshError) as refused:
        operators_of(driver).change(pb.ChangeRolloutRequest(**{"change": PAUSE, **fields}), NOBODY)
    assert text in str(refused.value)


def test_a_failed_attestation_takes_a_rollout_back_without_redis() -> None:
    """It moves traffic back, as an abort does. A passed one moves it forward and needs Redis."""
    document = baking(1, 10)
    driver = Driver(changed(document, settings=changed(document.settings, requirements=("evals",))))
    driver.lead()
    driver.hello("frontend-0", None)
    driver.core.on_store(None, driver.now_s)
    driver.answers = None
    operators, library = operators_of(driver), driver.core.library
    passed, failed = (
        operators.change(pb.ChangeRolloutRequest(change=ATTEST, requirement="evals", passed=each), NOBODY)
        for each in (True, False)
    )
    with pytest.raises(CommandRefused, match="Redis does not answer"):
        driver.core.command(passed.command(1, NOBODY, library), driver.now_s)
    driver.core.command(failed.command(2, NOBODY, library), driver.now_s)
    driver.perform()
    assert driver.done == {2: ""} and driver.sent[-1].content.canary_percent == 0


def test_only_an_attestation_has_another_author() -> None:
    """The caller of any other command stands in the report, whatever name the request has."""
    driver, caller = Driver(baking(1, 10)), Author("operator.kvmesh.internal")
    driver.lead()
    request = pb.ChangeRolloutRequest(change=PAUSE, by="somebody else")
    made = operators_of(driver).change(request, caller).run(0.0, driver.core.library)
    assert isinstance(made, RolloutDocument) and made.changes[-1].by == caller.name
