"""The control plane under faults: crashes, pauses, partitions, lost writes, clock steps, on a virtual clock.

Safety: no receiver goes back, no weight without a document, no weight of a rollout that was taken back. Liveness: every
rollout ends. `python -m tests.simulation.control` runs thousands of seeds, and replays one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.control.runs import run

pytestmark = pytest.mark.timeout(900)  # all CPU: a busy machine takes its time

SEEDS = 40


def test_rollouts_are_safe_and_end_under_faults() -> None:
    """Every seed keeps safety and liveness, and the seeds reach each end of a rollout."""
    ends: Counter[str] = Counter()
    for seed in range(SEEDS):
        ends.update(run(seed).ends())
    assert ends["COMPLETED"] >= SEEDS / 10 and ends["ROLLED_BACK"] >= SEEDS / 10, ends
