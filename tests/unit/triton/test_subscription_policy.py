"""Renewal of a subscription: often enough to bound the server's memory, and never too early."""

import random

from kvmesh.triton import subscription_policy
from kvmesh.triton.subscription_policy import SubscriptionPolicy


def events(boot: str, first: int, count: int) -> dict[str, object]:
    return {"boot_id": boot, "events": [{"event_id": first + index, "data": {}} for index in range(count)]}


def test_the_memory_of_a_server_is_bounded_by_a_snapshot_and_the_limit() -> None:
    """The memory of the server stays below the limit, or twice the snapshot, plus one message."""
    for seed in range(100):
        rng = random.Random(seed)
        one, event_id = SubscriptionPolicy("kv_events"), 0
        for _ in range(5):
            one.open()
            kept = snapshot = 0
            for part in range(rng.randrange(4)):
                size = rng.randrange(3 * subscription_policy.RENEW_BYTES)
                snapshot += size + subscription_policy.RESPONSE_BYTES
                message = {"boot_id": "b", "event_id": event_id, "part": part, "more": True, "snapshot": []}
                assert not one.record(message, size), f"seed={seed}"
            assert not one.record({"boot_id": "b", "event_id": event_id, "more": False, "snapshot": []}, 0)
            snapshot += subscription_policy.RESPONSE_BYTES
            bound, is_due = max(subscription_policy.ABANDON_BYTES, snapshot), False
            while not is_due:
                assert kept <= bound, f"seed={seed}"
                size = rng.randrange(subscription_policy.RENEW_BYTES // 3)
                kept += size + subscription_policy.RESPONSE_BYTES
                is_due = one.record(events("b", event_id + 1, 2), size)
                event_id += 2
            assert kept > bound, f"seed={seed}: renewed too early"


def test_the_next_stream_continues_after_the_last_event() -> None:
    """The first stream begins with a snapshot. So does a stream after a broken one, or after a part of a snapshot."""
    one = SubscriptionPolicy("kv_events")
    assert one.open() == {"request_type": "kv_events", "max_bytes": str(subscription_policy.RENEW_BYTES)}
    one.record({"boot_id": "b", "event_id": 4, "part": 0, "more": True, "snapshot": []}, 10)
    assert "after" not in one.open()
    one.record({"boot_id": "b", "event_id": 4, "part": 1, "more": False, "snapshot": []}, 10)
    assert one.open()["after"] == "b:4"
    one.record(events("b", 5, 3), 10)
    one.record({"boot_id": "b", "events": []}, 10)
    assert one.open()["after"] == "b:7"
    one.reset()
    assert "after" not in one.open()


def test_load_reports_have_no_position() -> None:
    """They are renewed like events. Small responses count with their overhead."""
    one = SubscriptionPolicy("load_report")
    asked = {"request_type": "load_report", "max_bytes": str(subscription_policy.RENEW_BYTES)}
    assert one.open() == asked
    taken = 1
    while not one.record({"boot_id": "b", "blocks_total": 5}, 300):
        taken += 1
        assert one.is_at_limit() == (
            taken > subscription_policy.RENEW_BYTES // (300 + subscription_policy.RESPONSE_BYTES) + 1
        )
    assert taken == subscription_policy.ABANDON_BYTES // (300 + subscription_policy.RESPONSE_BYTES) + 1
    assert one.open() == asked
    assert not one.is_at_limit()
