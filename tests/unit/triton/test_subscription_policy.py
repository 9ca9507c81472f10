"""When a subscription is opened anew: often enough for the server's memory, never for nothing."""

import random

from kvmesh.triton import subscription_policy
from kvmesh.triton.subscription_policy import SubscriptionPolicy


def events(boot: str, first: int, count: int) -> dict[str, object]:
    return {"boot_id": boot, "events": [{"event_id": first + index, "data": {}} for index in range(count)]}


def test_a_server_never_keeps_more_of_a_stream_than_a_snapshot_and_the_bound() -> None:
    """Whatever comes, what the server holds stays below the bound, or twice the snapshot, and one message."""
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
            assert kept > bound, f"seed={seed}: opened anew for nothing"


def test_the_next_stream_goes_on_behind_the_last_event() -> None:
    """The first one begins with a snapshot, so does one behind a broken one or in the middle of a snapshot."""
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
    """They are opened anew like events, by their number too: a small response is kept with all around it."""
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
