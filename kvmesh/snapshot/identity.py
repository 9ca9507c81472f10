"""A receiver as it introduces itself to a leader. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.fence import Fence


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about the process that do not change while it runs."""

    process_id: str
    boot_id: str
    role: str
    """ "frontend", "router", "prefill" or "decode"."""
    pool: str = ""
    """Pool of the process. Empty: a frontend, which serves all pools."""
    capabilities: tuple[str, ...] = ()
    model_versions: tuple[str, ...] = ()
    """Model versions that a frontend can serve."""

    def hello(self, fence: Fence) -> pb.ReceiverHello:
        """Return the first message to a leader: the process, its snapshot, its highest term, the ended rollouts."""
        current = fence.current
        return pb.ReceiverHello(
            process_id=self.process_id,
            boot_id=self.boot_id,
            role=self.role,
            pool=self.pool,
            capabilities=self.capabilities,
            model_versions=self.model_versions,
            snapshot=None if current is None else pb.Snapshot.FromString(current.data),
            highest_term=pb.Term(number=fence.highest_term.number, leader=fence.highest_term.leader),
            ended_rollouts=fence.ended_rollouts,
        )
