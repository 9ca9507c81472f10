"""The load of one replica: its last report, and the blocks that the router reserved since. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.placement.policy import ReplicaState

STEPS_KEPT: Final = 64
"""Reports of the engine's step time that are kept."""

STEPS_KEPT_S: Final = 60.0
"""Age at which a reported step time is forgotten, because the load has changed since."""

REPORT_FRESH_S: Final = 3.0
"""An older report does not show that the engine runs requests. A replica sends one at least each second."""


class ReplicaLoad:
    """Load of one replica, as reported and as reserved between two reports.

    `state` is the placement policy's view of the replica; another object after each loss of the stream.
    """

    __slots__ = ("_engine_boot_id", "_steps_us", "_unanswered", "report", "reported_s", "state")

    def __init__(self, name: str) -> None:
        self.state = ReplicaState(name)
        self.report: pb.LoadReport | None = None
        self.reported_s = 0.0
        self._engine_boot_id = ""
        self._unanswered: dict[int, int] = {}
        """KV blocks by slot, of submits that decode has not answered: no report counts them yet."""
        self._steps_us: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)
        """Time of the report and step time, oldest first."""

    def take(self, report: pb.LoadReport, now_s: float) -> bool:
        """Take a report. Return True if the engine has restarted since the last one."""
        self.report = report
        self.reported_s = now_s
        known_boot_id = self._engine_boot_id
        self._engine_boot_id = report.engine_boot_id or known_boot_id
        state = self.state
        state.block_total = report.block_total_count
        state.block_reserved = report.block_reserved_count + sum(self._unanswered.values())
        state.queued_requests = report.queued_request_count
        state.running_requests = report.running_request_count
        state.is_aggregated = report.aggregated
        if state.is_full:
            state.running_max = max(state.running_max, state.running_requests)
            state.is_full = 4 * state.running_requests > 3 * state.running_max or not state.running_max
        state.reported_at_s = now_s
        state.is_stale = False
        if report.step_us:
            self._steps_us.append((now_s, report.step_us))
        return bool(known_boot_id) and self._engine_boot_id != known_boot_id

    def reset(self) -> None:
        """Forget reports and reservations: the stream is lost and every slot of it is void."""
        assert not self._unanswered, f"{self.state.name} kept reservations of a lost stream"
        self.state = ReplicaState(self.state.name)

    def step_p95_us(self, now_s: float) -> int:
        """Return the 95th percentile of the engine's step times in the last minute's reports; 0 without any."""
        kept = self._steps_us
        while kept and now_s - kept[0][0] > STEPS_KEPT_S:
            kept.popleft()
        steps = sorted(step_us for _, step_us in kept)
        return steps[(95 * len(steps) - 1) // 100] if steps else 0

    def is_running(self, now_s: float) -> bool:
        """Return True if a fresh report says that the engine runs requests."""
        report = self.report
        return (
            report is not None
            and report.running_request_count > 0
            and now_s - self.reported_s < REPORT_FRESH_S
        )

    def prompt_count(self, sent: int) -> int:
        """Return how many prompts the replica has: as reported, at least the `sent` ones of this router."""
        if self.report is None:
            return sent
        return max(sent, self.report.queued_request_count + self.report.running_request_count)

    def reserve(self, slot: int, blocks: int) -> None:
        """Count `blocks` of a submit that is on its way."""
        self._unanswered[slot] = blocks
        self.state.block_reserved += blocks
        self.state.block_own += blocks

    def on_full(self) -> None:
        """Decode refused a submit for lack of slots."""
        self.state.is_full, self.state.running_max = True, 0

    def on_answered(self, slot: int) -> None:
        """Decode accepted or refused the submit: the next report counts its blocks, or does not."""
        self._unanswered.pop(slot, None)

    def is_unanswered(self, slot: int) -> bool:
        """Return True if decode neither accepted nor refused the submit."""
        return slot in self._unanswered

    def release(self, slot: int, blocks: int) -> None:
        """Give back the `blocks` of a slot that is over."""
        self._unanswered.pop(slot, None)
        state = self.state
        state.block_reserved = max(0, state.block_reserved - blocks)
        state.block_own = max(0, state.block_own - blocks)
