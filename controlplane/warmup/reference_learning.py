"""Asks serving decode replicas for the golden tokens of versions that have none yet. Pure.

A run beside users may end before its last prompt. Its answers are kept, and the next run has the prompts that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from controlplane.rollouts.golden import Answer
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import ReferenceJob, ReferenceResult
from controlplane.warmup.life import Life
from controlplane.warmup.references import ReferenceKey, References

ASKED_MAX: Final = 2
"""Replicas that are asked at a time: two that agree make a reference. A single one is asked twice."""

RETRY_S: Final = 10.0
"""Time from the end of a run that left prompts, or of a second one, to the next one on the same replica."""

RETRY_S_MAX: Final = 300.0
"""Longest such time. It doubles with each run without a single answer."""


@dataclass(slots=True)
class _Run:
    """The answers of one boot of an engine, until they are complete."""

    key: ReferenceKey
    engine_boot_id: str
    answers: dict[int, Answer] = field(default_factory=dict)
    """Good answers by the position of their prompts."""
    asked: tuple[int, ...] = ()
    """Positions of the prompts that run now. Empty: none runs."""
    retry_s: float = float("-inf")
    """Time before which no further prompt runs."""
    pause_s: float = RETRY_S


class ReferenceLearning:
    """See the module."""

    def __init__(self, references: References, fleet: Fleet, jobs: JobTable) -> None:
        self._references = references
        self._fleet = fleet
        self._jobs = jobs
        self._runs: dict[str, _Run] = {}
        """By replica: those that run golden prompts, have some left, or rest after their runs."""

    def can_tell(self, key: ReferenceKey, now_s: float) -> bool:
        """True if replicas in service can tell the golden tokens of `key` soon: two of them, or one without another.

        At least one of them runs the prompts, or will within RETRY_S. Two that disagree have told what they can.
        """
        found = self._fleet.referees(key)
        if len(found) == 1 and self._fleet.has_other_decode(key, found[0].name):
            return False
        return any(
            self._may_tell(key, each, now_s) and self._run_of(each).retry_s <= now_s + RETRY_S
            for each in found
        )

    def has_referees(self, key: ReferenceKey) -> bool:
        """True if the leases show replicas that can tell the golden tokens of `key`: two in service, or the only one."""
        found = self._fleet.leased_referees(key)
        return len(found) > 1 or (len(found) == 1 and not self._fleet.has_other_decode(key, found[0]))

    def forget(self) -> None:
        """Forget the runs: this process leads no more."""
        self._runs.clear()

    def step(self, most_s: float, now_s: float) -> None:
        """Ask for the golden tokens that are not known. A run takes `most_s` at most."""
        for name, run in list(self._runs.items()):
            if name not in self._fleet.lives and not run.asked:
                del self._runs[name]
        keys = {each.key for each in self._fleet.lives.values() if each.target.engine_boot_id}
        for key in sorted(key for key in keys if not self._references.expected(key)):
            for life in self._fleet.referees(key):
                if sum(bool(each.asked) and each.key == key for each in self._runs.values()) >= ASKED_MAX:
                    break
                run = self._run_of(life)
                if not self._may_tell(key, life, now_s) or life.job or run.asked or now_s < run.retry_s:
                    continue
                prompts = self._references.prompts(key)
                run.asked = tuple(at for at in range(len(prompts)) if at not in run.answers)
                chosen = tuple(prompts[at] for at in run.asked)
                self._jobs.run(ReferenceJob(life.target, chosen, now_s + most_s))

    def take(self, job: ReferenceJob, result: ReferenceResult, now_s: float) -> None:
        """Take the answers of a replica."""
        name = job.target.process_id
        run, life = self._runs.get(name), self._fleet.lives.get(name)
        if run is None or not run.asked:
            return
        asked, run.asked = run.asked, ()
        if life is None or life.target != job.target or not life.serves:
            del self._runs[name]
            return
        given = dict(zip(asked, result.answers, strict=False))
        good = {at: each for at, each in given.items() if not each.error}
        run.answers |= good
        run.pause_s = RETRY_S if good else min(2 * run.pause_s, RETRY_S_MAX)
        run.retry_s = now_s + run.pause_s
        if len(run.answers) < len(self._references.prompts(run.key)):
            return
        is_again, is_alone = self._has_claim(run.key, life), not self._fleet.has_other_decode(run.key, name)
        answers = tuple(each for _, each in sorted(run.answers.items()))
        self._references.claim(run.key, name, run.engine_boot_id, answers, is_alone=is_alone)
        run.answers = {}
        if not is_again:
            run.retry_s = now_s

    def _may_tell(self, key: ReferenceKey, life: Life, now_s: float) -> bool:
        """True if `life` has yet to tell its tokens, and is not a cold replica that users waited for."""
        is_told = self._has_claim(key, life) and self._fleet.has_other_decode(key, life.name)
        return not is_told and not (life.is_hurried and life.is_left_to_users(now_s))

    def _run_of(self, life: Life) -> _Run:
        """Return the run of this boot of the engine, or that of an earlier boot while its job goes on."""
        found = self._runs.get(life.name)
        if found is not None and found.asked:
            return found
        if found is None or (found.key, found.engine_boot_id) != (life.key, life.target.engine_boot_id):
            found = self._runs[life.name] = _Run(life.key, life.target.engine_boot_id)
        return found

    def _has_claim(self, key: ReferenceKey, life: Life) -> bool:
        return self._references.has_claim(key, life.name, life.target.engine_boot_id)
