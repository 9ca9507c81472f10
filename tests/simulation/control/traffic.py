"""Simulated requests that frontends tell the real judge of: equal versions, or one with errors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.assignment import Assignment, session_hash
from kvmesh.snapshot.content import Content

SESSIONS_PER_BATCH: Final = 20
"""Sessions of one frontend each second, of one request each."""


@dataclass
class Traffic:
    """The requests of one frontend. A batch that is sent again has the same rows."""

    rng: random.Random
    faulty_pool: str = ""
    """Pool with errors. Empty: none."""
    error_share: float = 0.0
    _rows: dict[int, list[pb.RequestEnd]] = field(default_factory=dict)
    """By the number of the batch."""

    def restart(self) -> None:
        """Forget all batches: the frontend counts anew."""
        self._rows.clear()

    def fill(self, batch: pb.ObservationBatch, content: Content) -> None:
        """Add the rows of a batch. `content`: in force at the frontend."""
        rows = self._rows.get(batch.sequence)
        if rows is None:
            rows = self._rows[batch.sequence] = self._requests(content)
        batch.ends.extend(rows)
        for pool in sorted({row.pool for row in rows}):
            number = sum(row.pool == pool for row in rows)
            batch.counts.add(pool=pool, started=number, ended=number)

    def _requests(self, content: Content) -> list[pb.RequestEnd]:
        rng, assignment, rows = self.rng, Assignment(content), []
        for _ in range(SESSIONS_PER_BATCH if content.running_rollout else 0):
            session = f"{rng.getrandbits(64):x}"
            pool = assignment.choose("", session).pool
            is_bad = pool == self.faulty_pool and rng.random() < self.error_share
            rows.append(
                pb.RequestEnd(
                    pool=pool,
                    rollout=content.rollout,
                    session=session_hash("", session),
                    outcome="ENGINE_ERROR" if is_bad else "ok",
                    ttft_s=rng.lognormvariate(-3.0, 0.3),
                    prompt_tokens=100,
                    computed_tokens=rng.randrange(15, 25),
                    duration_s=0.3,
                    gap_median_s=rng.lognormvariate(-4.0, 0.1),
                    gap_p95_s=0.03,
                    running_requests=4,
                    output_tokens=8,
                    finish_reason="length",
                    prefill_replica=f"{pool}-prefill-0",
                    decode_replica=f"{pool}-decode-0",
                )
            )
        return rows
