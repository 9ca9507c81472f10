"""Metrics of an HTTP server."""

from __future__ import annotations

from kvmesh.http1.server import HttpServer
from kvmesh.metrics import Metrics


def export_http(metrics: Metrics, server: HttpServer) -> None:
    """Export the connections of `server`, and those that its limit ended."""
    connections = server.connections
    metrics.gauge("http_connections", "Open connections of the HTTP port.", lambda: len(connections))
    metrics.total(
        "http_connections_refused",
        "Connections of the HTTP port that were closed because of the limit, new ones and idle ones.",
        lambda: connections.refused_total + connections.evicted_total,
    )
