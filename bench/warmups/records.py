"""The record of one run, and the file of all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench.run_records import RunRecords
from bench.warmups.arms import Setting
from bench.warmups.lease_states import LeaseState


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. Times are seconds, since the engine was ready unless said otherwise."""

    setting: str
    arm: str
    repeat: int
    """From 1."""
    commit: str
    cpu: str
    took_s: float
    """Duration of the whole run."""
    boot_s: float
    """From the start of the engine until it was ready."""
    steady_per_s: float
    """Tokens per second of the pool before the engine was killed."""
    cached_share: float
    """Share of prompt tokens from a prefix cache, before the engine was killed."""
    lost_replica_s: float
    """Lost capacity until the loss ended, or until the end of the run."""
    end_s: float | None = None
    """End of the loss; None: not within the run."""
    first_use_s: float | None = None
    """The first user's request at the fresh replica was answered; None: never."""
    first_requests: int = 0
    """Requests at the fresh replica that were compared."""
    first_borrowed: int = 0
    """First requests in a bucket without enough steady ones."""
    ttft_p95_s: float | None = None
    """p95 TTFT of the first requests at the fresh replica."""
    steady_ttft_p95_s: float | None = None
    """p95 TTFT of steady requests with the same mix of uncached sizes."""
    tpot_p95_s: float | None = None
    """p95 of the time per output token of the same first requests. None: not measured, as at a prefill."""
    steady_tpot_p95_s: float | None = None
    """The same of steady requests."""
    queue_alone_s: float | None = None
    """Median wait in the router's queue just before the engine was started: one replica alone."""
    queue_steady_s: float | None = None
    requests: int = 0
    errors: int = 0
    """Failed calls after the engine was ready."""
    busy_percent: float = 0.0
    """Use of all cores before the engine was killed."""
    states: tuple[LeaseState, ...] = ()
    """States of the replica's life. Empty: no control plane gave it one."""
    other_states: tuple[tuple[LeaseState, ...], ...] = ()
    """The same of the other replicas whose engines were restarted."""
    series: tuple[float, ...] = ()
    """Goodput over steady, per second, from BEFORE_S before the engine was ready."""
    problems: tuple[str, ...] = ()
    """Reasons to doubt the run."""

    @property
    def ttft_ratio(self) -> float | None:
        """p95 TTFT of the first requests over that of steady ones."""
        if self.ttft_p95_s is None or not self.steady_ttft_p95_s:
            return None
        return self.ttft_p95_s / self.steady_ttft_p95_s

    @property
    def tpot_ratio(self) -> float | None:
        """p95 of the time per output token of the first requests over that of steady ones."""
        if self.tpot_p95_s is None or not self.steady_tpot_p95_s:
            return None
        return self.tpot_p95_s / self.steady_tpot_p95_s


BEFORE_S = 20
"""Seconds of the series before the engine was ready."""


class Records(RunRecords[Record]):
    """The records of one file, oldest first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Record, lambda record: (record.setting, record.arm, record.repeat))

    def missing(self, runs: Iterable[tuple[Setting, str, int]]) -> list[tuple[Setting, str, int]]:
        """Return the runs without a record. Raises RecordError."""
        there = self.keys()
        return [
            (setting, arm, repeat)
            for setting, arm, repeat in runs
            if (setting.name, arm, repeat) not in there
        ]
