"""Metrics by tenant with a bounded number of series."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.tenants.labels import NAMES_MAX
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.requests.request_spec import NOBODY


def caller(name: str) -> object:
    return replace(NOBODY, tenant=replace(NOBODY.tenant, name=name))


def test_series_are_bounded_and_every_request_is_counted() -> None:
    """The first tenants have series of their own, all others share one.

    Refusals by quota are counted apart from other refusals.
    """
    metrics = Metrics("frontend")
    counts = TenantMetrics(metrics, [f"t{at}" for at in range(3 * NAMES_MAX)])
    before = metrics.text().count(b"\n")
    quota, other = MeshError("TOKEN_RATE_EXCEEDED", "x"), MeshError("QUEUE_FULL", "x")
    for at in range(3 * NAMES_MAX + 5):
        counts.on_refused(quota, caller(f"t{at}"))  # type: ignore[arg-type]
        counts.on_refused(other, caller(""))  # type: ignore[arg-type]
        counts.on_refused(other, None)
    assert metrics.text().count(b"\n") == before
    text = metrics.text().decode()
    rest = 2 * NAMES_MAX + 5
    assert f'requests_total{{outcome="TOKEN_RATE_EXCEEDED",tenant="other"}} {rest}.0' in text
    assert 'requests_total{outcome="TOKEN_RATE_EXCEEDED",tenant="t0"} 1.0' in text
    assert f'requests_total{{outcome="REFUSED",tenant="anonymous"}} {3 * NAMES_MAX + 5}.0' in text


def test_a_mesh_without_tenants_has_one_series_of_each() -> None:
    """A mesh without tenants has no extra series."""
    metrics = Metrics("frontend")
    TenantMetrics(metrics, ())
    text = metrics.text().decode()
    assert 'tenant="anonymous"' in text and 'tenant="other"' not in text
