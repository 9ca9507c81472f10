"""Calls of the control plane: no user's metric, rate or estimate counts them."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.metrics import Metrics
from kvmesh.telemetry import Tracing
from services.decode.telemetry import CallTelemetry as DecodeTelemetry
from services.prefill.telemetry import CallTelemetry as PrefillTelemetry
from tests.unit.decode import test_core as decode
from tests.unit.prefill import test_core as prefill
from tests.unit.triton.reader import submit

USER = (budget_pb2.PURPOSE_UNSPECIFIED, budget_pb2.PURPOSE_USER, budget_pb2.PURPOSE_SHADOW, 99)
CONTROL = {budget_pb2.PURPOSE_WARM_UP: "warm_up", budget_pb2.PURPOSE_PROBE: "probe"}


def run(replica: Any, phase: pb.Phase.ValueType, purpose: int) -> Any:
    """Run one prompt of `purpose` on a core; return its record."""
    message = submit(1, prefill.PROMPT, phase)
    message.budget.purpose = purpose  # type: ignore[assignment]  # a number of a later release
    replica.reader.open(1, 0)
    replica.send(submits=[message])
    for _ in range(20):
        if replica.records:
            break
        replica.step()
    (record,) = replica.records
    return record


@pytest.mark.parametrize("purpose", [*USER, *CONTROL])
def test_a_prefill_learns_from_users_alone(purpose: int) -> None:
    """Rates and totals of computed tokens stay as they were after a probe. A purpose of a later release is a user's."""
    replica = prefill.Replica()
    record = run(replica, pb.PHASE_CONTEXT_ONLY, purpose)
    prefilling = replica.core.prefilling
    is_counted = purpose not in CONTROL
    assert record.purpose == CONTROL.get(purpose, "")  # type: ignore[call-overload]
    assert (prefilling.computed_token_total > 0) == is_counted
    assert (prefilling.prefill_rate.run_s is not None and prefilling.prefill_rate.run_s > 0) == is_counted


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_probe_has_a_metric_of_its_own(role: str) -> None:
    """Neither the users' counters and histograms nor spans have it."""
    metrics = Metrics(role)
    tracing = Tracing(role, "i", 1.0)
    record: Any
    if role == "prefill":
        telemetry: Any = PrefillTelemetry(metrics, tracing)
        record = run(prefill.Replica(), pb.PHASE_CONTEXT_ONLY, budget_pb2.PURPOSE_PROBE)
    else:
        telemetry = DecodeTelemetry(metrics, tracing)
        record = run(decode.Replica(), pb.PHASE_CONTEXT_AND_GENERATION, budget_pb2.PURPOSE_PROBE)
    telemetry(record)
    telemetry(record)
    text = metrics.text().decode()
    assert f'kvmesh_{role}_control_calls_total{{outcome="{record.outcome}",purpose="probe"}} 2.0' in text
    assert "engine_calls" not in text
    counted = [line for line in text.splitlines() if not line.startswith("#") and "control_calls" not in line]
    assert counted and all(line.endswith(" 0.0") for line in counted)
