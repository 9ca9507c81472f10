"""The end of a request for its client: a finish reason or an error. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests import faults
from services.frontend.requests.progress import Progress
from services.frontend.requests.request_spec import RequestSpec

CUT: Final = "DEADLINE_CUT"
"""Outcome of an answer that the mesh's own limit cut. DEADLINE is the reason of a request that failed by its deadline."""


def outcome_of(reason: pb.FinishReason.ValueType) -> str:
    """Return the name of a good end for metrics and logs; no error has this name."""
    if reason == pb.FINISH_REASON_DEADLINE:
        return CUT
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request for its client: good with a finish reason, or an error."""

    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    error: MeshError | None = None

    @property
    def name(self) -> str:
        """Name for metrics and logs: the finish reason or the error's reason."""
        if self.error is not None:
            return self.error.reason
        return outcome_of(self.finish_reason)


def finished(progress: Progress, reason: pb.FinishReason.ValueType) -> Outcome:
    """Return a good end. Undecided text becomes certain, and may complete a stop string."""
    output = progress.output
    if output.stop_string is None:
        output.flush()
    if output.stop_string is not None:
        reason = pb.FINISH_REASON_STOP_STRING
    return Outcome(finish_reason=reason)


def completed(progress: Progress) -> Outcome | None:
    """Return the end of a request if all of its tokens have arrived and only the finish row was lost; else None."""
    reason = progress.completion()
    return finished(progress, reason) if reason != pb.FINISH_REASON_UNSPECIFIED else None


def by_deadline(spec: RequestSpec, progress: Progress, fault: str = "") -> Outcome:
    """Return the end of a request at its deadline, which this frontend or a hop behind it has enforced.

    Good if the deadline is the mesh's own and the request has tokens, else an error. `fault`: the reason why the request
    was not running.
    """
    if progress.ids and not spec.timing.is_clients_deadline:
        return finished(progress, pb.FINISH_REASON_DEADLINE)
    return Outcome(error=faults.time_over(spec, progress, fault))
