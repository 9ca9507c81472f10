"""How a request ended for its client.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended for its client: well, with a reason, or with an error."""

    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    error: MeshError | None = None

    @property
    def outcome(self) -> str:
        """Name for metrics and logs: the finish reason or the error's reason."""
        if self.error is not None:
            return self.error.reason
        return pb.FinishReason.Name(self.finish_reason).removeprefix("FINISH_REASON_")
