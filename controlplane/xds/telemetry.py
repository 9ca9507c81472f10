"""Metrics of the role `xds`, read at each scrape."""

from __future__ import annotations

from functools import partial

from controlplane.xds.feed import Feed
from controlplane.xds.publication import Publication
from controlplane.xds.server import AdsServer
from kvmesh.metrics import Metrics


def export(server: AdsServer, publication: Publication, feed: Feed, metrics: Metrics) -> None:
    """Export the streams, the refusals of clients, and the refusals before publishing."""
    metrics.gauge("streams", "Open streams of clients.", lambda: len(server))
    metrics.total("answers", "Answers that clients got.", lambda: server.answers_total)
    for kind in server.nacks:
        metrics.total(
            "nacks",
            "Answers that clients refused (NACK).",
            partial(server.nacks.__getitem__, kind),
            kind=kind,
        )
    metrics.total(
        "cut_streams", "Streams cut off, because the client took no answer.", lambda: server.cut_total
    )
    metrics.total("refused_streams", "Streams refused at the limit.", lambda: server.refused_total)
    metrics.total(
        "refused_topologies",
        "Changes of frontends that were not published, because clients would refuse them.",
        lambda: publication.refused_total,
    )
    metrics.gauge(
        "topology_refused",
        "1 while the frontends known now are not published, and the last good ones stay.",
        lambda: float(bool(publication.fault)),
    )
    metrics.gauge(
        "unpublished_frontends",
        "Frontends that are not published, because their address is no IP address.",
        lambda: len(feed.left_out),
    )
