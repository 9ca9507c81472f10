"""The facts of pools from leases and reports."""

from __future__ import annotations

import pytest

from controlplane.pools.registry import Registry
from controlplane.rollouts.view import PoolFacts
from controlplane.snapshots.receivers import Receiver, Receivers
from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.unit.controlplane.rollouts.test_golden_schedule import member


def facts(report: pb.ReceiverReport) -> PoolFacts:
    """Return the facts of a pool whose router sends `report`."""
    registry, receivers = Registry(), Receivers()
    registry.take([member("next", role) for role in ("router", "prefill", "decode")], 0.0)
    receivers.hello(Receiver("next-router-0", "b1", "router", "next", report=report), 0.0)
    return registry.facts(["next"], receivers, ())["next"]


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


def test_a_pool_without_processes_has_no_live_request() -> None:
    """A rollback does not wait for the requests of a pool that is gone; it waits for those of a pool that is silent."""
    registry, receivers = Registry(), Receivers()
    assert registry.facts(["next"], receivers, ())["next"].live_requests == 0
    registry.take([member("next", "router")], 0.0)
    assert registry.facts(["next"], receivers, ())["next"].live_requests is None
