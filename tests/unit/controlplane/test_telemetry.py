"""Metrics of a control process: what the alert rules of rollouts read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane import telemetry
from controlplane.rollouts import transitions
from kvmesh.clock import MonotonicClock
from kvmesh.metrics import Metrics
from kvmesh.snapshot.content import RolloutState
from kvmesh.snapshot.published import Term, publish
from tests.unit.controlplane.test_core import Driver
from tests.unit.controlplane.test_takeover import baking, content_of

PREFIX = "kvmesh_control_"


def scraped(driver: Driver) -> dict[str, float]:
    """Return the values of one scrape by metric; those of `rollout_state` by `rollout_state=STATE`."""
    metrics = Metrics("control")
    total = SimpleNamespace(dropped_total=0, failure_total=0, cut_total=0)
    loop: Any = SimpleNamespace(
        core=driver.core, store=SimpleNamespace(audit=total, folder=total), streams=total
    )
    telemetry.export(loop, metrics, MonotonicClock())
    return {
        each.name.removeprefix(PREFIX)
        + "".join(f"={state}" for name, state in each.labels.items() if name == "state"): each.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for each in family.samples
    }


def states(found: dict[str, float]) -> set[str]:
    """Return the states whose value is 1."""
    return {state.name for state in RolloutState if found[f"rollout_state={state.name}"] == 1}


def test_a_running_rollout_has_one_state_its_step_and_the_time_since_its_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alert `no change for an hour` reads the time; it begins anew with each step."""
    document = baking(2, 25)
    driver = Driver(document, board=publish(Term(3, "control-9"), 1, content_of(document)))
    driver.lead()
    running = driver.core.library.running
    assert running is not None
    monkeypatch.setattr(telemetry, "wall_s", lambda: running.changed_s + 90.0)
    found = scraped(driver)
    assert states(found) == {"BAKING"} and found["is_leader"] == 1
    assert (found["rollout_step"], found["canary_weight_percent"]) == (2, 25)
    assert found["rollout_unchanged_seconds"] == 90.0
    monkeypatch.setattr(telemetry, "wall_s", lambda: running.changed_s - 5.0)
    assert scraped(driver)["rollout_unchanged_seconds"] == 0


def test_without_a_running_rollout_nothing_ages() -> None:
    """The state of the last rollout stays, so that a rollback can be alerted on after its end."""
    calm = Driver()
    calm.lead()
    found = scraped(calm)
    assert states(found) == {"NONE"} and found["rollout_unchanged_seconds"] == found["rollout_step"] == 0
    document = baking(1, 10)
    back = transitions.taken_back(document, "abort", 1003.0)
    ended = Driver(transitions.rolled_back(back, "weight 0 is acknowledged", 1004.0))
    ended.lead()
    found = scraped(ended)
    assert states(found) == {"ROLLED_BACK"} and found["rollout_unchanged_seconds"] == 0
