"""What routers were told of a replica's cache, as metrics."""

from __future__ import annotations

from kvmesh.metrics import Metrics
from kvmesh.prefix_index.publisher import Publisher


def export(publisher: Publisher, metrics: Metrics) -> None:
    """Export what `publisher` counts, read at each scrape."""
    metrics.total(
        "index_published_blocks",
        "Blocks stored or removed, told as events.",
        lambda: publisher.published_block_total,
    )
    metrics.gauge("index_blocks", "Blocks in the cache.", lambda: publisher.block_count)
    metrics.total("index_snapshots", "Snapshots of the cache written.", lambda: publisher.snapshot_total)
    metrics.total(
        "index_dropped_blocks",
        "Blocks stored or removed, not told: a snapshot took their place.",
        lambda: publisher.dropped_block_total,
    )
