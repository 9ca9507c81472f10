"""Asks serving decode replicas for the golden tokens of versions that have none yet. Pure."""

from __future__ import annotations

from typing import Final

from controlplane.warmup.fleet import Fleet
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import ReferenceJob, ReferenceResult
from controlplane.warmup.life import Life
from controlplane.warmup.references import ReferenceKey, References

ASKED_MAX: Final = 2
"""Replicas that are asked at a time: two that agree make a reference. A single one is asked twice."""

RETRY_S: Final = 10.0
"""Time from the end of a run without an answer, or of a second one, to the next one on the same replica."""


class ReferenceLearning:
    """See the module."""

    def __init__(self, references: References, fleet: Fleet, jobs: JobTable) -> None:
        self._references = references
        self._fleet = fleet
        self._jobs = jobs
        self._asked: dict[str, ReferenceKey] = {}
        """Replicas that run golden prompts now."""
        self._retry_s: dict[str, float] = {}
        """Replicas that did not answer, with the time of the next try."""

    def referees(self, key: ReferenceKey) -> list[Life]:
        """Return the serving decode replicas that can tell the golden tokens of `key`."""
        return self._fleet.referees(key)

    def forget(self) -> None:
        """Forget the runs: this process leads no more."""
        self._asked.clear()
        self._retry_s.clear()

    def step(self, most_s: float, now_s: float) -> None:
        """Ask for the golden tokens that are not known. A run takes `most_s` at most."""
        keys = {each.key for each in self._fleet.lives.values() if each.target.engine_boot_id}
        for key in sorted(key for key in keys if not self._references.expected(key)):
            for life in self.referees(key):
                if sum(each == key for each in self._asked.values()) >= ASKED_MAX:
                    break
                is_told = self._has_claim(key, life) and self._fleet.has_other_decode(key, life.name)
                is_asked = life.name in self._asked or is_told
                if is_asked or life.job or now_s < self._retry_s.get(life.name, now_s):
                    continue
                self._asked[life.name] = key
                self._jobs.run(ReferenceJob(life.target, self._references.prompts(key), now_s + most_s))

    def take(self, job: ReferenceJob, result: ReferenceResult, now_s: float) -> None:
        """Take the answers of a replica."""
        name = job.target.process_id
        key, life = self._asked.pop(name, None), self._fleet.lives.get(name)
        if key is None or life is None or life.target != job.target or not life.serves:
            return
        if result.error or any(each.error for each in result.answers):
            self._retry_s[name] = now_s + RETRY_S
            return
        is_again, engine = self._has_claim(key, life), life.target.engine_boot_id
        is_alone = not self._fleet.has_other_decode(key, name)
        self._references.claim(key, name, engine, result.answers, is_alone=is_alone)
        if is_again:
            self._retry_s[name] = now_s + RETRY_S

    def _has_claim(self, key: ReferenceKey, life: Life) -> bool:
        return self._references.has_claim(key, life.name, life.target.engine_boot_id)
