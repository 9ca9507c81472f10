"""Queue delays that routers and replicas report, and the users that wait for cold replicas."""

from __future__ import annotations

import pytest

from controlplane.snapshots.receivers import Receiver
from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S
from controlplane.warmup.user_queues import user_queues
from kvmesh.control.v1 import snapshot_pb2 as pb


def receiver(
    role: str, report: pb.ReceiverReport | None, *, name: str = "a", pool: str = "default"
) -> Receiver:
    """Return a connected receiver."""
    found = Receiver(f"{role}-{name}", "b", role, pool)
    found.is_connected, found.report = True, report
    return found


def delay(seconds: float, *, places: bool = True, live: int = 0) -> pb.ReceiverReport:
    """Return a report with a queue delay."""
    return pb.ReceiverReport(queue_delay_us=round(seconds * 1e6), can_place=places, live_request_count=live)


def test_the_largest_delay_of_each_role_counts() -> None:
    """Routers count for all roles of their pool, replicas for their own role. Other pools do not count."""
    queues = user_queues(
        [
            receiver("router", delay(0.2)),
            receiver("router", delay(0.4), name="b"),
            receiver("prefill", delay(3.0)),
            receiver("prefill", delay(2.0), name="b"),
            receiver("decode", delay(0.0)),
            receiver("router", delay(9.0), pool="other"),
        ]
    )
    assert queues.routers == {"default": 0.4, "other": 9.0}
    assert queues.delay_s("default", "prefill") == 3.0
    assert queues.delay_s("default", "decode") == 0.4
    assert queues.do_users_wait("default", "prefill")
    assert not queues.do_users_wait("default", "decode")
    assert queues.do_users_wait("other", "decode")
    assert not queues.do_users_wait("unknown", "decode")


@pytest.mark.parametrize(
    ("report", "waits"),
    [
        (delay(0.0, places=False, live=1), True),
        (delay(0.0, places=False), False),
        (delay(0.0, live=9), False),
        (delay(QUEUE_DELAY_MAX_S), True),
        (delay(QUEUE_DELAY_MAX_S - 0.01), False),
        (None, False),
    ],
)
def test_users_wait(report: pb.ReceiverReport | None, waits: bool) -> None:
    """At a router that has requests and can place none, or in a queue of a second or more."""
    queues = user_queues([receiver("router", report)])
    assert queues.do_users_wait("default", "prefill") is waits


def test_who_is_gone_or_no_part_of_a_pool_does_not_count() -> None:
    """A lost router's last report, and the frontends."""
    lost = receiver("router", delay(9.0, places=False, live=1))
    lost.is_connected = False
    queues = user_queues([lost, receiver("frontend", delay(9.0, places=False, live=1), pool="")])
    assert queues == user_queues([])
