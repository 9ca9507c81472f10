"""The jobs under way at the leader. Pure. INVARIANT: one job and one seeding for a life at a time."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.warmup.actions import CancelJob, LifeAction, RunJob
from controlplane.warmup.jobs import Job, RecordJob, SeedJob
from controlplane.warmup.life import Life


class JobTable:
    """See the module. `emit` takes the actions."""

    def __init__(self, emit: Callable[[LifeAction], None]) -> None:
        self._emit = emit
        self._jobs: dict[int, Job] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, job: Job) -> int:
        """Ask for `job`; return its number."""
        number, self._next = self._next, self._next + 1
        self._jobs[number] = job
        self._emit(RunJob(number, job))
        return number

    def run_for(self, life: Life, job: Job) -> None:
        """Ask for `job`, which works on `life`."""
        assert not life.job, f"{life.name} has the job {life.job}"
        life.job, life.is_job_witness = self.run(job), True

    def seed(self, life: Life, job: SeedJob) -> None:
        """Ask for the seeding `job` of `life`."""
        assert not life.seed_job, f"{life.name} has the seeding {life.seed_job}"
        life.seed_job, life.is_seed_witness = self.run(job), True

    def take(self, number: int) -> Job | None:
        """Remove and return the job of a result. None: it was cancelled."""
        return self._jobs.pop(number, None)

    def record(self, number: int) -> RecordJob | None:
        """Return the job of that number if it asks what is hot."""
        job = self._jobs.get(number)
        return job if isinstance(job, RecordJob) else None

    def end(self, life: Life) -> None:
        """Cancel the job of `life`, if it has one."""
        self.cancel(life.job)
        life.job = 0

    def end_all(self, life: Life) -> None:
        """Cancel the job and the seeding of `life`."""
        self.end(life)
        self.cancel(life.seed_job)
        life.seed_job = 0

    def cancel(self, number: int) -> None:
        """Cancel a job; an unknown number is ignored."""
        if self._jobs.pop(number, None) is not None:
            self._emit(CancelJob(number))

    def cancel_all(self) -> None:
        """Cancel every job."""
        for number in list(self._jobs):
            self.cancel(number)
