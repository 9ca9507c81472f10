"""Metrics of a frontend's shadow traffic. Copies are in no other metric."""

from __future__ import annotations

from functools import partial

from kvmesh.metrics import Metrics
from services.frontend.shadow.shadowing import Shadowing
from services.frontend.shadow.traffic import DROPPED


def watch_shadow(metrics: Metrics, shadowing: Shadowing) -> None:
    """Export the state and the totals of shadow traffic."""
    traffic = shadowing.traffic
    metrics.gauge("shadow_in_flight", "Requests with a running copy.", lambda: traffic.in_flight)
    metrics.gauge("shadow_queued", "Sampled requests that wait to be copied.", lambda: traffic.queued)
    metrics.gauge(
        "shadow_copying",
        "1 while sampled requests are copied, else 0.",
        lambda: float(
            traffic.shadow is not None and traffic.tally is not None and not traffic.tally.off_reason
        ),
    )
    metrics.total("shadow_copies", "Requests that were copied.", lambda: traffic.copied_total)
    metrics.total(
        "shadow_tokens",
        "Prompt and output tokens of copies, in no tenant's count.",
        lambda: traffic.token_total,
    )
    text = "Sampled requests that were not copied or not compared, by reason."
    for reason in DROPPED:
        metrics.total(
            "shadow_dropped", text, partial(traffic.dropped_totals.__getitem__, reason), reason=reason
        )
    metrics.total(
        "shadow_faults", "Exceptions in shadow traffic that were caught.", lambda: shadowing.fault_total
    )
