"""Statistics of the models of this surface, as ModelStatistics returns them. Pure.

Time counts from the arrival of a request to its end. `queue` is the part before its first token, and `compute_infer` the
part behind it. Each request is an execution of its own.
"""

from __future__ import annotations

from typing import Any

from services.frontend.surface.kserve.protocol import service_pb2
from services.frontend.surface.kserve.served_models import VERSION


class ModelCounts:
    """Counts of one model."""

    __slots__ = ("compute_ns", "fail_count", "fail_ns", "last_ms", "queue_ns", "success_count")

    def __init__(self) -> None:
        self.success_count = 0
        self.fail_count = 0
        self.queue_ns = 0
        self.compute_ns = 0
        self.fail_ns = 0
        self.last_ms = 0


class Statistics:
    """Counts of all models, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, ModelCounts] = {}

    def succeeded(self, model: str, queue_s: float, compute_s: float, wall_ms: int) -> None:
        """Count a request that ended well at `wall_ms`, milliseconds since 1970."""
        counts = self._of(model)
        counts.success_count += 1
        counts.queue_ns += round(queue_s * 1e9)
        counts.compute_ns += round(compute_s * 1e9)
        counts.last_ms = wall_ms

    def failed(self, model: str, seconds: float) -> None:
        """Count a request that ended with an error, or was cancelled."""
        counts = self._of(model)
        counts.fail_count += 1
        counts.fail_ns += round(seconds * 1e9)

    def message(self, model: str) -> Any:
        """Return the ModelStatistics of `model`."""
        counts = self._counts.get(model) or ModelCounts()
        done = counts.success_count
        total_ns = counts.queue_ns + counts.compute_ns
        duration, nothing = service_pb2.StatisticDuration, service_pb2.StatisticDuration(count=done)
        made = service_pb2.ModelStatistics(
            name=model,
            version=VERSION,
            last_inference=counts.last_ms,
            inference_count=done,
            execution_count=done,
            inference_stats=service_pb2.InferStatistics(
                success=duration(count=done, ns=total_ns),
                fail=duration(count=counts.fail_count, ns=counts.fail_ns),
                queue=duration(count=done, ns=counts.queue_ns),
                compute_input=nothing,
                compute_infer=duration(count=done, ns=counts.compute_ns),
                compute_output=nothing,
            ),
        )
        if done:
            made.batch_stats.add(
                batch_size=1,
                compute_input=nothing,
                compute_infer=duration(count=done, ns=counts.compute_ns),
                compute_output=nothing,
            )
        return made

    def _of(self, model: str) -> ModelCounts:
        return self._counts.setdefault(model, ModelCounts())
