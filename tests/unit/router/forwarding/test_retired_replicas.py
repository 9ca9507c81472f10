"""A replica with a newer process of its name: its attempts go on, and are no work of the newer one."""

from __future__ import annotations

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.placement.policy import Dispatched
from tests.unit.router.desk import A, Desk, first


def test_prompts_of_a_retired_replica_do_not_count_for_its_successor() -> None:
    """The newer process starts with an empty queue, whichever router had sent work.

    The older one's prompts still end well.
    """
    desk = Desk()
    slot = desk.submit(A, tokens=400)
    decode, reserved = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=reserved.slot)])
    (asked,) = desk.up("prefill-0").submits
    desk.policy.observe(Dispatched("router-1", "e" * 32, "prefill-0", (), 1.0, desk.now_s, desk.now_s + 60))
    assert desk.policy.queue_s("prefill-0", desk.now_s) > 1.0
    old = desk.links["prefill-0"]
    desk.core.retire_replica(old[0])
    desk.add("prefill-0", "prefill")
    assert desk.policy.queue_s("prefill-0", desk.now_s) == 0.0
    assert len(desk.policy.backlog) == 0
    new, desk.links["prefill-0"] = desk.links["prefill-0"], old
    desk.policy.observe(Dispatched("router-1", "f" * 32, "prefill-0", (), 1.0, desk.now_s, desk.now_s + 60))
    for _ in range(3):  # the older process reports its own load
        desk.now_s += 1.0
        desk.down("prefill-0", load_report=pb.LoadReport(engine_ready=True))
    assert desk.policy.queue_s("prefill-0", desk.now_s) == 1.0
    desk.told()
    desk.down("prefill-0", starts=[pb.Start(slot=asked.slot)], first_tokens=[first(asked.slot)])
    assert [row.slot for row in desk.told().first_tokens] == [slot]
    desk.links["prefill-0"] = new
    for _ in range(3):
        desk.now_s += 1.0
        desk.down("prefill-0", load_report=pb.LoadReport(engine_ready=True))
    assert desk.policy.queue_s("prefill-0", desk.now_s) == 0.0
