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


def delay(seconds: float, *, wait_s: float = 0.0, places: bool = True, live: int = 0) -> pb.ReceiverReport:
    """Return a report with a queue delay and the longest wait."""
    return pb.ReceiverReport(
        queue_delay_us=round(seconds * 1e6),
        can_place=places,
        longest_wait_us=round(wait_s * 1e6),
        live_request_count=live,
    )


def waits(*receivers: Receiver, serving: tuple[str, ...] = ("prefill-a",), other: bool = True) -> bool:
    """Return whether users of the pool "default" wait for a prefill replica. `serving`: those in service."""
    return user_queues(receivers).do_users_wait("default", serving, does_other_role_serve=other)


def test_delays_count_for_their_pool() -> None:
    """The largest one of the routers, and each replica by name. Frontends and lost receivers do not count."""
    lost = receiver("router", delay(9.0, wait_s=9.0, places=False, live=1), name="lost")
    lost.is_connected = False
    queues = user_queues(
        [
            receiver("router", delay(0.2)),
            receiver("router", delay(0.4), name="b"),
            receiver("prefill", delay(0.0, wait_s=3.0)),
            receiver("router", delay(9.0), pool="other"),
            receiver("router", None, pool="silent"),
            receiver("frontend", delay(9.0, wait_s=9.0, places=False, live=1)),
            lost,
        ]
    )
    assert queues.routers == {"default": 0.4, "other": 9.0}
    assert queues.replicas == {"prefill-a": 3.0}
    assert not queues.unplaced
    assert queues.is_long_at("default", "prefill-a") and not queues.is_long_at("default", "prefill-b")
    assert queues.is_long_at("other", "prefill-b")


@pytest.mark.parametrize("delay_s", [0.0, QUEUE_DELAY_MAX_S - 0.01, QUEUE_DELAY_MAX_S])
def test_users_wait_in_the_queue_of_routers(delay_s: float) -> None:
    """Whether a replica serves or not."""
    found = receiver("router", delay(delay_s))
    assert waits(found) is waits(found, serving=()) is (delay_s >= QUEUE_DELAY_MAX_S)


def test_a_long_wait_counts_as_a_long_queue() -> None:
    """The queue delay of a restarted engine remembers the warm one."""
    router, replica = receiver("router", delay(0.1, wait_s=3.0)), receiver("prefill", delay(0.1, wait_s=2.0))
    assert waits(router) and waits(replica)
    assert user_queues([replica]).is_long_at("default", "prefill-a")
    assert not user_queues([replica]).is_long_at("default", "prefill-b")
    assert user_queues([router]).routers == {"default": 0.1}, (
        "the rule for warm pools goes by the queue delay"
    )


def test_users_wait_if_each_replica_in_service_has_a_queue() -> None:
    """A slow or hung one alone is no reason: the others take its users. A held replica has no queue and does not count."""
    busy = receiver("prefill", delay(0.0, wait_s=2.0))
    idle = receiver("prefill", delay(0.0), name="b")
    assert waits(busy, idle)
    assert not waits(busy, idle, serving=("prefill-a", "prefill-b"))
    assert not waits(busy, serving=("prefill-a", "stranger"))
    assert not waits(busy, serving=())


@pytest.mark.parametrize(
    ("report", "does"),
    [
        (delay(0.0, places=False, live=1), True),
        (delay(0.0, places=False), False),
        (delay(0.0, live=9), False),
        (None, False),
    ],
)
def test_users_wait_at_a_router_that_can_place_none(report: pb.ReceiverReport | None, does: bool) -> None:
    """If the other role is missing, no replica of this one helps them. A router that can place serves them."""
    found = receiver("router", report)
    assert waits(found, serving=()) is does
    assert not waits(found, receiver("router", delay(0.0), name="b"), serving=())


def test_no_replica_of_one_role_helps_users_without_the_other() -> None:
    """However long they wait, at routers or at replicas."""
    router = receiver("router", delay(5.0, wait_s=5.0, places=False, live=1))
    replica = receiver("prefill", delay(5.0, wait_s=5.0))
    for serving in ((), ("prefill-a",)):
        assert waits(router, replica, serving=serving)
        assert not waits(router, replica, serving=serving, other=False)
