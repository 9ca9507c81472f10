"""The gauges of the KV cache of prefill and decode replicas."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.metrics import Metrics
from services.decode import telemetry as decode_telemetry
from services.prefill import telemetry as prefill_telemetry
from tests.unit.decode import test_core as decode
from tests.unit.prefill import test_core as prefill
from tests.unit.replica.test_held import send
from tests.unit.triton.fake_engine import facts

ROLES = [
    pytest.param(prefill.Replica, prefill_telemetry.export, pb.PHASE_CONTEXT_ONLY, id="prefill"),
    pytest.param(decode.Replica, decode_telemetry.export, pb.PHASE_CONTEXT_AND_GENERATION, id="decode"),
]


def gauge(metrics: Metrics, name: str) -> float:
    """Return the value of a gauge without labels."""
    (metric,) = [one for one in metrics.collect() if one.name == f"kvmesh_any_{name}"]
    (sample,) = metric.samples
    return float(sample.value)


@pytest.mark.parametrize(("make", "export", "phase"), ROLES)
def test_the_used_ratio_is_that_of_reserved_blocks(make: Any, export: Any, phase: pb.Phase.ValueType) -> None:
    """It is 0 without requests, above 0 with one, and 0 again after its end."""
    replica, metrics = make(), Metrics("any")
    export(replica.core, metrics)

    def ratio() -> float:
        used = gauge(metrics, "kv_used_ratio")
        assert used == gauge(metrics, "reserved_blocks") / 64
        return used

    assert ratio() == 0
    send(replica, 1, phase, 0)
    assert 0 < ratio() < 1
    replica.send(cancels=[pb.Cancel(slot=1, reason=pb.Cancel.REASON_CLIENT)])
    assert ratio() == 0


@pytest.mark.parametrize(("make", "export", "phase"), ROLES)
def test_an_engine_without_blocks_has_the_ratio_0(make: Any, export: Any, phase: pb.Phase.ValueType) -> None:
    """A scrape does not fail, and an autoscaler sees no load."""
    replica, metrics = make(model=facts(kv_blocks=0)), Metrics("any")
    export(replica.core, metrics)
    send(replica, 1, phase, 0)
    assert (gauge(metrics, "kv_blocks"), gauge(metrics, "kv_used_ratio")) == (0, 0)
