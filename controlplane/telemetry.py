"""Metrics of a control process, read from the core at each scrape."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from controlplane import views
from controlplane.core import ControlCore
from controlplane.loop import ControlLoop
from controlplane.region_telemetry import export_regions
from controlplane.rollouts.verdict import Verdict
from controlplane.warming import Warming
from kvmesh.clock import Clock, wall_s
from kvmesh.life_state import LifeState
from kvmesh.metrics import Metrics
from kvmesh.snapshot.content import RolloutState

GATES: Final = ("errors", "ttft", "gap", "computed_share")
"""Gates with a statistical test."""

TRACKS: Final = ("stable", "canary", "baseline")


def export(loop: ControlLoop, metrics: Metrics, clock: Clock) -> None:
    """Export leadership, receivers, the running rollout and the store."""
    core, store = loop.core, loop.store
    metrics.gauge("is_leader", "1 while this process leads.", lambda: float(core.leads))
    metrics.gauge(
        "term", "Number of the term in force, as far as this process knows; 0: none.", lambda: _term(core)
    )
    metrics.gauge("redis_connected", "1 while Redis answers.", lambda: float(core.has_redis))
    metrics.gauge("receivers", "Receivers with an open stream.", lambda: views.connected_count(core))
    metrics.gauge(
        "receivers_behind",
        "Receivers with an open stream that lack the latest snapshot.",
        lambda: views.behind_count(core),
    )
    metrics.total(
        "rejected_snapshots",
        "Refusals (NACKs) of snapshots by receivers.",
        lambda: core.receivers.nacks_total,
    )
    metrics.total(
        "cut_streams", "Streams cut off: the receiver took or sent nothing.", lambda: loop.streams.cut_total
    )
    metrics.total("dropped_events", "Audit entries that only the log has.", lambda: store.audit.dropped_total)
    metrics.total("state_failures", "Failed writes to the state folder.", lambda: store.folder.failure_total)
    metrics.gauge(
        "observation_age_seconds",
        "Seconds since the last observations of a frontend; +Inf before the first.",
        lambda: clock.now_s() - core.observed_s,
    )
    _export_rollout(core, metrics)
    _export_lives(core.warming, metrics)
    if core.regions is not None:
        export_regions(core.regions, metrics, clock)


def _export_lives(warming: Warming, metrics: Metrics) -> None:
    for state in LifeState:
        metrics.gauge(
            "lives",
            "Replicas that the leader drives, by the state that it ordered.",
            partial(_count_in, warming, state),
            state=state.value,
        )
    metrics.gauge(
        "unproved_replicas",
        "Replicas that serve without a proof of their warm-up.",
        lambda: sum(each.serves and not each.is_proved for each in warming.lives.fleet.lives.values()),
    )
    metrics.gauge("warm_up_jobs", "Jobs of warm-ups under way.", lambda: len(warming.lives.jobs))
    metrics.gauge(
        "quarantined_packages",
        "Packages that are not used, because they ended boots or an operator said so.",
        lambda: sum(bool(each.quarantined) for each in warming.packages.ordered()),
    )


def _count_in(warming: Warming, state: LifeState) -> float:
    return sum(each.state is state for each in warming.lives.fleet.lives.values())


def _export_rollout(core: ControlCore, metrics: Metrics) -> None:
    metrics.gauge(
        "canary_weight_percent", "Weight of the canary in force.", lambda: core.content.canary_percent
    )
    for state in RolloutState:
        metrics.gauge(
            "rollout_state",
            "1 for the state of the running rollout, or of the last one.",
            partial(_is_in, core, state.name),
            state=state.name,
        )
    metrics.gauge(
        "rollout_unchanged_seconds",
        "Seconds since the running rollout changed its state or its step; 0: none runs.",
        lambda: _unchanged_s(core),
    )
    metrics.gauge("rollout_step", "Step of the running rollout; 0: none.", lambda: _step(core))
    for track in TRACKS:
        metrics.gauge(
            "rollout_samples",
            "Sessions of the present step that the judge has, by track.",
            partial(_of_verdict, core, partial(_samples, track=track)),
            track=track,
        )
    for gate in GATES:
        metrics.gauge(
            "gate_p",
            "Probability of such a difference between equal arms, by gate; NaN: no test yet.",
            partial(_of_verdict, core, partial(_p, gate=gate), math.nan),
            gate=gate,
        )


def _term(core: ControlCore) -> float:
    if core.leads:
        return core.leadership.term.number
    return core.publisher.latest.name.term.number if core.publisher.latest is not None else 0


def _is_in(core: ControlCore, state: str) -> float:
    document = core.library.current
    return float(state == (document.state_name if document is not None else RolloutState.NONE.name))


def _unchanged_s(core: ControlCore) -> float:
    running = core.library.running
    return max(0.0, wall_s() - running.changed_s) if running is not None else 0.0


def _step(core: ControlCore) -> float:
    running = core.library.running
    return running.step if running is not None else 0


def _of_verdict(core: ControlCore, read: Callable[[Verdict], float], otherwise: float = 0.0) -> float:
    running = core.library.running
    return read(running.verdict) if running is not None else otherwise


def _samples(verdict: Verdict, track: str) -> float:
    return sum(each.sessions for each in verdict.samples if each.track == track)


def _p(verdict: Verdict, gate: str) -> float:
    found = [each.p for each in verdict.gates if each.name == gate and each.p is not None]
    return min(found, default=math.nan)
