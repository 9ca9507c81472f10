"""Metrics of the published cache events and snapshots."""

from __future__ import annotations

from kvmesh.metrics import Metrics
from kvmesh.prefix_index.publisher import Publisher


def export(publisher: Publisher, metrics: Metrics) -> None:
    """Export the counts of `publisher`, read at each scrape."""
    metrics.total(
        "index_published_blocks",
        "Blocks stored or removed, published as events.",
        lambda: publisher.published_block_total,
    )
    metrics.gauge("index_blocks", "Blocks in the cache.", lambda: publisher.block_count)
    metrics.total("index_snapshots", "Snapshots of the cache written.", lambda: publisher.snapshot_total)
    metrics.total(
        "index_dropped_blocks",
        "Blocks stored or removed, not published as events: a snapshot replaced them.",
        lambda: publisher.dropped_block_total,
    )
