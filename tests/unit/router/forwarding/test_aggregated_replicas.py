"""Decode replicas whose engine takes no handoffs: they run prompts themselves, beside others that take them."""

from __future__ import annotations

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import Desk

ROOM = {"engine_ready": True, "block_total_count": 1000, "block_free_count": 1000}


def report(desk: Desk, name: str, *, aggregated: bool) -> None:
    """Let a decode replica report its load."""
    desk.down(name, load_report=pb.LoadReport(aggregated=aggregated, **ROOM))  # type: ignore[arg-type]


def test_prompts_run_on_decode_alone_where_no_handoff_works() -> None:
    """As in a pool without prefill replicas, until one of them takes handoffs again."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        report(desk, name, aggregated=True)
    desk.submit()
    decode, submit = desk.placed()
    assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
    assert not any(desk.up(name).submits for name in desk.links if name != decode)
    report(desk, "decode-0", aggregated=False)
    desk.submit(request_id=f"{2:032x}")
    decode, submit = desk.placed()
    assert (decode, submit.phase) == ("decode-0", pb.PHASE_GENERATION_ONLY)


def test_handoffs_go_to_the_replicas_that_take_them() -> None:
    """The others would refuse them."""
    desk = Desk(queue=64)
    handed = 0
    for number in range(20):
        report(desk, "decode-0", aggregated=True)
        report(desk, "decode-1", aggregated=False)
        desk.submit(request_id=f"{number + 1:032x}")
        desk.wait(0.05)
        assert not desk.up("decode-0").submits
        handed += [one.phase for one in desk.up("decode-1").submits] == [pb.PHASE_GENERATION_ONLY]
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    assert handed == 20


def test_refused_handoffs_are_placed_again_on_decode_alone() -> None:
    """A refusal may come before the load report that tells why."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        report(desk, name, aggregated=False)
    desk.submit()
    for _ in range(2):
        decode, submit = desk.placed()
        assert submit.phase == pb.PHASE_GENERATION_ONLY
        desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_DRAINING)])
        report(desk, decode, aggregated=True)
    desk.wait(0.2)
    _, submit = desk.placed()
    assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
