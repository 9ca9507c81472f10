"""Exports whether a process is listed under its name, and the members that it refuses."""

from __future__ import annotations

from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics


def export(registration: Registration, address_filter: AddressFilter, metrics: Metrics) -> None:
    """Export it, and how many members are refused; read at each scrape."""
    metrics.gauge(
        "name_held",
        "1 while this process is listed under its name; 0 before that, and while another process of the name is.",
        lambda: float(registration.is_holder),
    )
    metrics.total(
        "name_superseded",
        "Times that another process took this one's name.",
        lambda: registration.superseded_total,
    )
    metrics.total(
        "refused_members",
        "Members that were refused because of an address outside trust.networks.",
        lambda: address_filter.refused_total,
    )
