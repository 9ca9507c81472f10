"""Metrics of the name lease and of refused members."""

from __future__ import annotations

from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics


def export(registration: Registration, address_filter: AddressFilter, metrics: Metrics) -> None:
    """Export the state of the name lease and the refused members, read at each scrape."""
    metrics.gauge(
        "name_held",
        "1 while this process holds the lease of its name; 0 before that, and while another process holds it.",
        lambda: float(registration.is_holder),
    )
    metrics.total(
        "name_superseded",
        "Takeovers of the name by another process.",
        lambda: registration.superseded_total,
    )
    metrics.total(
        "refused_members",
        "Members refused for an address outside trust.networks.",
        lambda: address_filter.refused_total,
    )
