"""The dispatcher records each prompt of a user once, and no other work."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from services.router.hot.release_recorder import ReleaseRecorder
from tests.unit.router.desk import A, B, Desk


def recording() -> tuple[Desk, ReleaseRecorder]:
    recorder = ReleaseRecorder(4)
    return Desk(on_release=recorder), recorder


def test_a_released_prompt_is_recorded_with_its_shapes() -> None:
    """Tokens, hashes and tenant are those of the submit. Nothing is known of the load yet: a batch of one."""
    desk, recorder = recording()
    desk.submit(tokens=20, tenant="search", session_id="s")
    (one,) = recorder.prompts.current()
    assert (one.tenant, one.token_ids, len(one.block_hashes)) == ("search", pack_ids(range(20)), 8 * 5)
    assert [shape[:2] for shape in recorder.shapes.ranked(desk.now_s)] == [(32, 0), (0, 1)]


@pytest.mark.parametrize(
    "fields",
    [
        {"resumed": True},
        {"shadow": True},
        {"purpose": budget_pb2.PURPOSE_SHADOW},
        {"purpose": budget_pb2.PURPOSE_WARM_UP},
        {"purpose": budget_pb2.PURPOSE_PROBE},
    ],
    ids=str,
)
def test_work_without_a_user_and_resumed_attempts_are_not_recorded(fields: dict[str, Any]) -> None:
    """Neither their prompts nor their shapes."""
    desk, recorder = recording()
    desk.submit(**fields)
    desk.placed()
    assert len(recorder.prompts) == 0 and not recorder.shapes.ranked(desk.now_s)


@pytest.mark.parametrize("purpose", [budget_pb2.PURPOSE_UNSPECIFIED, budget_pb2.PURPOSE_USER, 77])
def test_a_later_purpose_counts_as_a_user(purpose: int) -> None:
    """As budget.proto says."""
    desk, recorder = recording()
    desk.submit(purpose=purpose)
    assert len(recorder.prompts) == 1


def test_a_prompt_that_waits_is_recorded_at_its_release() -> None:
    """A request that never left the queue warms no cache."""
    desk, recorder = recording()
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    desk.submit()
    assert len(recorder.prompts) == 0


def test_an_attempt_that_is_placed_again_counts_once() -> None:
    """After a refusal by decode, and as another attempt that no engine had taken."""
    desk, recorder = recording()
    desk.submit(session_id="s")
    decode, submit = desk.placed()
    refusal = pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)
    desk.down(decode, refusals=[refusal])
    again, _ = desk.placed()
    assert again != decode
    assert [shape.weight for shape in recorder.shapes.ranked(desk.now_s)] == [1.0, 1.0]
    slot = desk.submit(session_id="s", attempt=2)
    desk.placed()
    (one,) = recorder.prompts.current()
    assert one.weight == 1.0
    desk.ask(cancels=[pb.Cancel(slot=slot)])
    desk.submit(B, session_id="s")
    (one,) = recorder.prompts.current()
    assert one.weight == 2.0 and one.request_id == B != A


def test_a_prompt_below_a_block_counts_by_its_shape_alone() -> None:
    """It has no prefix."""
    desk, recorder = recording()
    desk.submit(tokens=3)
    assert len(recorder.prompts) == 0
    assert [shape[:2] for shape in recorder.shapes.ranked(desk.now_s)] == [(4, 0), (0, 1)]


def test_the_batch_is_that_of_the_decode_replica() -> None:
    """The running requests that it reported, and the new one."""
    desk, recorder = recording()
    for name in ("decode-0", "decode-1"):
        report = pb.LoadReport(
            engine_ready=True, block_total_count=1000, block_free_count=1000, running_request_count=4
        )
        desk.down(name, load_report=report)
    desk.submit(tokens=20)
    assert [shape[:2] for shape in recorder.shapes.ranked(desk.now_s)] == [(32, 0), (0, 8)]
