"""The facts of pools from leases and reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.pools.registry import BOOT_WINDOW_S, Registry
from controlplane.rollouts.view import PoolFacts
from controlplane.snapshots.receivers import Receiver, Receivers
from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.unit.controlplane.rollouts.test_golden_schedule import member


def facts(report: pb.ReceiverReport) -> PoolFacts:
    """Return the facts of a pool whose router sends `report`."""
    registry, receivers = Registry(), Receivers()
    registry.take([member("next", role) for role in ("router", "prefill", "decode")], 0.0)
    receivers.hello(Receiver("next-router-0", "b1", "router", "next", report=report), 0.0)
    return registry.facts({"next": "v"}, receivers, ())["next"]


@pytest.mark.parametrize("load", [float("inf"), float("nan"), -0.1, 1e9])
@pytest.mark.parametrize("name", ["prefill_load_share", "uncached_prefill_s_per_s"])
def test_a_load_out_of_range_is_unknown(name: str, load: float) -> None:
    """A router cannot stop the control plane by its report, nor make a pool look idle."""
    report = pb.ReceiverReport(prefill_load_share=0.2, uncached_prefill_s_per_s=0.4)
    good = facts(report)
    assert (good.prefill_load, good.uncached_prefill) == (0.2, 0.4)
    setattr(report, name, load)
    bad = facts(report)
    assert bad.prefill_load is None and bad.uncached_prefill is None


def test_a_process_that_has_sent_no_report_says_nothing() -> None:
    """Its stream has begun. An empty report would mean that it cannot place, and that it has no request."""
    registry, receivers = Registry(), Receivers()
    registry.take([member("next", "router")], 0.0)
    receivers.hello(Receiver("next-router-0", "b1", "router", "next"), 0.0)
    pool = registry.facts({"next": "v"}, receivers, ())["next"]
    assert pool.queue_delay_s is None and pool.live_requests is None


def test_a_pool_without_processes_has_no_live_request() -> None:
    """A rollback does not wait for the requests of a pool that is gone; it waits for those of a pool that is silent."""
    registry, receivers = Registry(), Receivers()
    assert registry.facts({"next": "v"}, receivers, ())["next"].live_requests == 0
    registry.take([member("next", "router")], 0.0)
    assert registry.facts({"next": "v"}, receivers, ())["next"].live_requests is None


def test_each_start_of_a_process_or_of_its_engine_counts_once() -> None:
    """An engine that is found after its process belongs to the start of the process; a second engine is a start."""
    registry, lease = Registry(), member("next", "decode")
    registry.take([member("next", "router")], 0.0)

    def starts(boot: str, engine: str) -> int:
        return len(registry.take([replace(lease, boot_id=boot, engine_boot_id=engine)], 1.0))

    leases = [
        ("a", ""),
        ("a", "e1"),
        ("a", "e1"),
        ("a", ""),
        ("a", "e2"),
        ("a", "e1"),
        ("b", "e2"),
        ("b", "e3"),
    ]
    assert [starts(*each) for each in leases] == [1, 0, 0, 0, 1, 0, 1, 1]


def test_the_starts_of_the_first_poll_are_not_told() -> None:
    """A new leader does not know when they were."""
    registry = Registry()
    assert not registry.take([member("next", "decode")], 0.0)
    assert registry.take([replace(member("next", "decode"), engine_boot_id="e9")], 1.0) == []


def test_processes_of_another_version_do_not_count() -> None:
    """A router with another configuration would get no request, and a replica would be refused by its router."""
    registry, receivers = Registry(), Receivers()
    members = [member("next", role) for role in ("router", "prefill", "decode")]
    members[0] = replace(members[0], model_version="v1")
    registry.take(members, 0.0)
    found = registry.facts({"next": "v"}, receivers, ())["next"]
    assert (found.routers, found.prefill, found.decode) == (0, 1, 1)
    assert found.other_versions == ('next-router-0 serves "v1"',)


def test_processes_of_another_version_get_no_golden_prompt() -> None:
    """Their tokens are those of another version. A process is known for some minutes after its lease."""
    registry = Registry()
    registry.take([member("next", "decode"), member("next", "decode", 1, model_version="v1")], 0.0)
    assert [each.process_id for each in registry.serving({"next": "v"})] == ["next-decode-0"]
    assert registry.serving({"other": "v"}) == []
    registry.take([member("next", "decode")], 10.0)
    assert registry.knows("next-decode-1") and not registry.knows("next-decode-2")
    registry.take([member("next", "decode")], 10.0 + 2 * BOOT_WINDOW_S)
    assert not registry.knows("next-decode-1")
