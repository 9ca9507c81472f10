"""Metrics of a receiver, read at each scrape."""

from __future__ import annotations

from kvmesh.metrics import Metrics
from kvmesh.snapshot.receiver import Receiver


def export(receiver: Receiver, metrics: Metrics) -> None:
    """Export the snapshot in force, the stream to the leader, and the counts of faults."""

    def term() -> float:
        return float(receiver.current.name.term.number) if receiver.current is not None else 0.0

    def version() -> float:
        return float(receiver.current.name.version) if receiver.current is not None else 0.0

    metrics.gauge("snapshot_term", "Number of the term of the snapshot in force; 0: none.", term)
    metrics.gauge("snapshot_version", "Version of the snapshot in force in its term; 0: none.", version)
    metrics.gauge(
        "control_connected",
        "1 while a stream to the leading control process is up, else 0.",
        lambda: float(receiver.is_connected),
    )
    metrics.gauge(
        "control_silence_seconds",
        "Time since the last message of a leading control process, or since the start without any.",
        receiver.silence_s,
    )
    metrics.gauge(
        "snapshot_reduced",
        "1 while the process serves the stable pool alone, because it refused a snapshot, else 0.",
        lambda: float(receiver.is_reduced),
    )
    metrics.total(
        "snapshot_rejections",
        "Snapshots that the process refused (NACK).",
        lambda: receiver.rejected_total,
    )
    metrics.total(
        "snapshot_restores",
        "Snapshots put back into Redis, which had lost them.",
        lambda: receiver.restored_total,
    )
    metrics.total(
        "snapshot_state_failures",
        "Writes of the snapshot to the state folder that failed.",
        lambda: receiver.state_failure_total,
    )
