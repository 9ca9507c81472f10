"""The lives of replicas under faults: crashes, pauses, bad engines, bad packages, lost leases, on a virtual clock.

Safety: see the checkers. Liveness: five minutes after the last fault every replica serves and is proved.
`python -m tests.simulation.lives` runs thousands of seeds, and replays one.
"""

from __future__ import annotations

from collections import Counter

from tests.simulation.lives.runs import run

SEEDS = 150

CASES = (
    "alone",
    "boot ended",
    "hurried by cold peers",
    "hurried by queue",
    "hurried by share",
    "package quarantined",
    "proved",
    "quarantined",
    "unproved",
    "unproved: another leader",
    "unproved: known engine",
    "unproved: no golden tokens",
    "unproved: no proof in time",
    "with package",
)
"""Cases that the seeds reach."""


def test_lives_are_safe_and_end_under_faults() -> None:
    """Every seed keeps safety and liveness, and the seeds reach each case."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(run(seed).world.check.seen)
    assert not [case for case in CASES if not seen[case]], seen
