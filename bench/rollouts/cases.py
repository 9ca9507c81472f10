"""The cases of `make rollouts`: a version, its fault, the weight at which the fault begins, and the wanted end. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PROMOTED: Final = "COMPLETED"
TAKEN_BACK: Final = "ROLLED_BACK"
"""Names of final states (kvmesh.snapshot.content.RolloutState)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    title: str
    faults: str = ""
    """Faults of the canary's engines (engines.reference.faults)."""
    kills: str = ""
    """Process of the canary that is killed and started again, BOOTS times. Empty: none."""
    begin_percent: int = 10
    """The fault begins when the canary has this weight."""
    wanted: str = TAKEN_BACK
    is_same_version: bool = False
    """The canary's pool has the stable version itself."""
    has_quiet: bool = False
    """The same load is measured without a rollout, before and behind it."""
    is_hang: bool = False
    has_deadly_prompts: bool = False
    """DEADLY_SHARE of the sessions begin with DEADLY_IDS. Dead engines of the canary are started again."""

    @property
    def is_faulty(self) -> bool:
        """True if a fault is injected."""
        return bool(self.faults or self.kills)


DEADLY_IDS: Final = (401, 402, 403)
DEADLY_SHARE: Final = 0.05
"""At 8 sessions per second and 10 % one such session reaches the canary in 25 s: an engine boots in less."""

AA: Final = Case("aa", "A/A: the same version in both arms", wanted=PROMOTED, is_same_version=True)

CASES: Final = (
    Case("good", "good version (same salt)", wanted=PROMOTED, has_quiet=True),
    Case("gaps", "gaps +30 %", "slow=1.3"),
    Case("errors", "5 % errors", "errors=0.05"),
    Case("wrong", "5 % wrong tokens", "wrong=0.05"),
    Case("hang", "hang", "hang=1", is_hang=True),
    Case("leak", "leak of 2 MiB per request", "leak_bytes=2097152"),
    Case("crashes", "crash loop of decode", kills="next-decode-0"),
    Case(
        "deadly", "death at a given prompt", f"die={'-'.join(map(str, DEADLY_IDS))}", has_deadly_prompts=True
    ),
    Case("miss", "a cache that never hits", "miss=1"),
    Case("late", "5 % errors that begin at 50 %", "errors=0.05", begin_percent=50),
)
"""In the order of the table."""

BOOTS: Final = 3
BOOT_EVERY_S: Final = 12.0
"""Time between two kills of a crash loop: a boot takes some seconds, and its lease must be seen."""

RUNS: Final = 5
RUNS_AA: Final = 10

BY_NAME: Final = {case.name: case for case in (*CASES, AA)}


def planned(names: list[str], runs: int) -> list[tuple[Case, int]]:
    """Return case and number of all runs, from 1. The run is the outer loop, so a noisy hour spoils one run of each."""
    most = max((runs_of(name, runs) for name in names), default=0)
    return [
        (BY_NAME[name], run) for run in range(1, most + 1) for name in names if run <= runs_of(name, runs)
    ]


def runs_of(name: str, runs: int) -> int:
    """Return the runs of a case. 0 for `runs`: RUNS, or RUNS_AA of A/A."""
    return runs or (RUNS_AA if name == AA.name else RUNS)
