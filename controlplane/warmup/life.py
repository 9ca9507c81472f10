"""The life of one replica as the leader drives it: its state, its proofs, and what it waits for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from controlplane.warmup.jobs import PassResult, SeedResult, Target
from controlplane.warmup.references import ReferenceKey
from kvmesh.life_state import LifeState

PASSES_MIN: Final = 2
"""Passes over the shapes whose times are compared."""

EQUAL_SHARE: Final = 0.1
"""Two passes are equal if their times differ by at most this share."""

WARM_BY_SERVICE_S: Final = 30.0
"""Time in service after which a replica counts as warm: users' work has warmed it up."""

ENGINE_LOST_S: Final = 3.0
"""Silence of an engine after which its replica does not count as one that serves."""

RISK_S: Final = 900.0
"""Time from a failed pass or seeding in which the end of the boot counts against the warm-up. A large engine loads for
minutes, and only its next boot shows that it died.
"""


@dataclass(slots=True)
class Life:
    """One boot of a replica and of its engine. Times are on the leader's monotonic clock."""

    target: Target
    key: ReferenceKey
    state: LifeState
    """The state that the leader ordered; before its first order the one that the replica reported."""
    since_s: float
    seen_s: float
    """Time at which this leader first heard of the boot."""
    reported: LifeState
    is_connected: bool = True
    is_self_served: bool = False
    is_proved: bool = False
    reported_proved: bool = False
    was_proved: bool = False
    """True if an earlier leader proved it."""
    is_known_engine: bool = False
    """True if the engine served before: its service alone was started anew."""
    is_adopted: bool = False
    """True if an earlier leader took it into service and did not prove it. It may be cold."""
    engine_silent_s: float | None = None
    """Time of the report that its engine does not answer. None: it answers."""
    is_hurried: bool = False
    """True if it was released before its warm-up ended, because the pool needs it."""
    is_awaited: bool = False
    """True if users waited for it when it was released, or may have waited when it was adopted."""
    package: str = ""
    warmed_lengths: frozenset[int] | None = None
    """Prompt lengths of the passes at the replica itself, or of its users: powers of two. None: unknown."""
    passes: list[PassResult] = field(default_factory=list)
    seed: SeedResult | None = None
    seed_job: int = 0
    """Number of the seeding under way; 0: none. It runs beside the other jobs, and goes on in service."""
    seed_began_s: float = float("-inf")
    seed_tries: int = 0
    has_copied: bool = False
    """True if a seeding of this life copied a block."""
    is_seeded: bool = False
    """True if no seeding follows any more: it has ended, or there is nothing to copy."""
    positions: tuple[int, ...] = ()
    """Golden prompts of the probe under way."""
    suspects: frozenset[int] = frozenset()
    """Golden prompts that gave wrong tokens once."""
    warmed_batch: int = 0
    """Largest batch for golden prompts: of its passes, or of its users if it was released before them. 0: unknown."""
    runs_alone: bool = False
    """True if a decode computes its golden prompts itself, because some failed or were wrong with those of a prefill."""
    passed: frozenset[int] = frozenset()
    """Golden prompts that gave the golden tokens."""
    is_probed: bool = False
    """True if the prompts of a probe while it was held gave the golden tokens, and the checks passed."""
    job: int = 0
    """Number of the job under way; 0: none."""
    is_job_witness: bool = False
    """True if no work has ended without an answer since its job began: good answers show that its engine lives."""
    is_seed_witness: bool = False
    """The same for its seeding."""
    risk_end_s: float = float("-inf")
    """Time until which the end of the boot counts against its warm-up: a pass or a seeding may have caused it."""
    retry_s: float = float("-inf")
    """Time before which no further job begins."""
    fruitless_pause_s: float = 1.0
    """Pause after a probe without an answer, in service, of a replica that users waited for. It doubles."""
    untold_s: float | None = None
    """Time since which no replica can tell the golden tokens that it waits for. None: one can, or it does not wait."""
    ordered_s: float = float("-inf")
    reason: str = ""
    """Condition that the replica waits for, or the cause of its present state."""
    times: dict[LifeState, float] = field(default_factory=dict)
    """Seconds in each earlier state."""

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.target.process_id

    @property
    def is_warm(self) -> bool:
        """True if the shapes are proved warm."""
        return self.is_known_engine or is_warm(self.passes)

    @property
    def serves(self) -> bool:
        """True if it takes users' requests, or was ordered to."""
        return self.state is LifeState.SERVING

    @property
    def is_engine_silent(self) -> bool:
        """True while its engine does not answer. A load stream that is opened again takes a moment, too."""
        return self.engine_silent_s is not None

    def is_engine_lost(self, now_s: float) -> bool:
        """True if its engine has not answered for ENGINE_LOST_S."""
        return self.engine_silent_s is not None and now_s - self.engine_silent_s >= ENGINE_LOST_S

    def hear_engine(self, now_s: float, *, is_silent: bool) -> None:
        """Take from a report whether the engine answers."""
        if not is_silent:
            self.engine_silent_s = None
        elif self.engine_silent_s is None:
            self.engine_silent_s = now_s

    def is_cold(self, now_s: float) -> bool:
        """True if it serves, and neither its passes nor the time of its service show that it is warm."""
        is_shown = self.is_proved or is_warm(self.passes) or (self.is_known_engine and not self.is_adopted)
        return self.serves and not is_shown and self.age_s(now_s) < WARM_BY_SERVICE_S

    def is_left_to_users(self, now_s: float) -> bool:
        """True while it serves cold, and users waited for it: they warm it up. All other work would delay them."""
        return self.is_awaited and self.is_cold(now_s)

    def age_s(self, now_s: float) -> float:
        """Return the seconds in the present state."""
        return max(0.0, now_s - self.since_s)

    def go(self, state: LifeState, now_s: float, reason: str = "", *, keeps_job: bool = False) -> None:
        """Enter `state`. The job of the state before is forgotten, unless `keeps_job`. The seeding goes on."""
        self.times[self.state] = self.times.get(self.state, 0.0) + self.age_s(now_s)
        self.state, self.since_s, self.reason = state, now_s, reason
        if not keeps_job:
            self.retry_s, self.positions = float("-inf"), ()
            self.end_job(now_s, is_well=False)

    def end_job(self, now_s: float, *, is_well: bool) -> None:
        """Note the end of its job. `is_well`: the engine answered everything, so no earlier work has ended it."""
        self.job = 0
        self._end_risk(now_s, is_well=is_well, is_proof=self.is_job_witness and not self.seed_job)

    def end_seed_job(self, now_s: float, *, is_well: bool) -> None:
        """Note the end of its seeding."""
        self.seed_job = 0
        self._end_risk(now_s, is_well=is_well, is_proof=self.is_seed_witness and not self.job)

    def _end_risk(self, now_s: float, *, is_well: bool, is_proof: bool) -> None:
        if not is_well:
            self.is_job_witness = self.is_seed_witness = False
        is_over = is_well and is_proof
        self.risk_end_s = float("-inf") if is_over else min(self.risk_end_s, now_s + RISK_S)


def is_warm(passes: list[PassResult]) -> bool:
    """Return the proof of WARMING from the passes without errors.

    An engine that counts cold steps is warm after a pass without one. Any other engine is warm once two passes in a row
    take equal times.
    """
    if not passes or passes[-1].error:
        return False
    last = passes[-1]
    if last.cold_steps is not None:
        return last.cold_steps == 0
    good = [each for each in passes if not each.error]
    if len(good) < PASSES_MIN:
        return False
    before = good[-2]
    return abs(last.seconds - before.seconds) <= EQUAL_SHARE * max(last.seconds, before.seconds)
