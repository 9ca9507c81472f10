"""The lives of all replicas, as the leader drives them: STARTING, WARMING, SEEDING, PROBING, SERVING, QUARANTINED. Pure.

A replica reports its state on its Watch stream, and the leader orders the next one. Jobs do the work of a state
(`controlplane.warmup.jobs`). Every replica ends in SERVING, or in QUARANTINED after wrong golden tokens.

INVARIANT: a state is left for a later one only. INVARIANT: a replica in QUARANTINED is never ordered into service.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Final

from controlplane.warmup.actions import LifeAction, Told
from controlplane.warmup.boots import Boots
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.fleet import FOUND_BEFORE, Fleet, remember
from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S, released
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import (
    PassResult,
    ProbeResult,
    ReferenceJob,
    ReferenceResult,
    Result,
    SeedResult,
)
from controlplane.warmup.life import Life
from controlplane.warmup.life_state import state_of
from controlplane.warmup.life_steps import RETRY_S, LifeSteps, Routers
from controlplane.warmup.packages import Packages
from controlplane.warmup.reference_learning import ReferenceLearning
from controlplane.warmup.references import References
from controlplane.warmup.settings import WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

RELEASE_PAUSE_S: Final = 1.0
"""Time between two replicas of a pool that a long queue calls into service."""

PASSES_KEPT: Final = 8


class Lives:
    """See the module. `emit` takes the actions, in order. `bounds` gives the bounds of a pool.

    `on_quarantined` is called with the name of a package that ended boots of two replicas.
    """

    def __init__(
        self,
        settings: WarmUpSettings,
        references: References,
        packages: Packages,
        bounds: Callable[[str], ModelBounds],
        emit: Callable[[LifeAction], None],
        on_quarantined: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.boots = Boots()
        self.is_due = False
        """True if an event came since the last step."""
        self.fleet = Fleet()
        self.jobs = JobTable(emit)
        self._learning = ReferenceLearning(references, self.fleet, self.jobs)
        self._steps = LifeSteps(
            settings, references, self._learning, self.fleet, self.boots, packages, self.jobs, bounds, emit
        )
        self._emit = emit
        self._on_quarantined = on_quarantined
        self._reports: dict[str, tuple[str, pb.ReplicaLife]] = {}
        """Last report of each connected replica, with the boot id of its process."""
        self._released_s: dict[tuple[str, str], float] = {}
        """Time of the last release for a long queue, by pool and role."""

    def get(self, process_id: str) -> Life | None:
        """Return the life of a replica. None: this process does not drive it."""
        return self.fleet.lives.get(process_id)

    def proves(self, pools: Container[str], now_s: float, service_max_s: float) -> bool:
        """True if a replica of `pools` is warmed up, or proves itself in service: for `service_max_s` at most.

        The time of a replica that is held is bounded by the settings of the warm-up.
        """
        if not self.settings.drives_lives:
            return False
        return any(
            life.target.pool in pools
            and life.is_connected
            and bool(life.target.engine_boot_id)
            and not life.is_proved
            and life.state is not LifeState.QUARANTINED
            and not (life.serves and (life.age_s(now_s) >= service_max_s or self.fleet.is_draining(life)))
            for life in self.fleet.lives.values()
        )

    # Events.

    def on_members(self, members: Iterable[Member], now_s: float) -> None:
        """Take the leases. Followers take them too: they remember which engines were in service."""
        self.fleet.list_members(members)
        for name, (boot_id, report) in list(self._reports.items()):
            life = self.fleet.lives.get(name)
            if life is None or life.target.boot_id != boot_id:
                self._meet(name, boot_id, report, now_s)
        self.is_due = True

    def on_report(self, process_id: str, boot_id: str, report: pb.ReplicaLife, now_s: float) -> None:
        """Take the life that a connected replica reports."""
        self._reports[process_id] = (boot_id, report)
        self._meet(process_id, boot_id, report, now_s)

    def on_gone(self, process_id: str, boot_id: str) -> None:
        """Note the end of a replica's stream. Without a leader it serves by itself after some seconds."""
        if process_id in self._reports and self._reports[process_id][0] == boot_id:
            del self._reports[process_id]
            life = self.fleet.lives.get(process_id)
            if life is not None:
                life.is_connected, life.untold_s = False, None
            self.is_due = True

    def on_result(self, number: int, result: Result, now_s: float) -> None:
        """Take the result of a job. That of a cancelled one is ignored."""
        job = self.jobs.take(number)
        if job is None:
            return
        self.is_due = True
        if isinstance(job, ReferenceJob) and isinstance(result, ReferenceResult):
            self._learning.take(job, result, now_s)
            return
        life = next((each for each in self.fleet.lives.values() if number in (each.job, each.seed_job)), None)
        if life is None:
            return
        if isinstance(result, SeedResult):
            life.end_seed_job(now_s, is_well=is_well(result))
            self._steps.take_seed(life, result, now_s)
            return
        life.end_job(now_s, is_well=is_well(result))
        if isinstance(result, PassResult):
            life.passes = [*life.passes, result][-PASSES_KEPT:]
            life.retry_s = now_s + RETRY_S if result.error else now_s
        elif isinstance(result, ProbeResult):
            self._steps.take_probe(life, result, now_s)

    def forget(self) -> None:
        """Forget lives and jobs: this process leads no more. Boots, references and engines stay."""
        self.jobs.cancel_all()
        self._learning.forget()
        self.fleet.lives.clear()
        self._reports.clear()
        self._released_s.clear()

    # Decisions.

    def step(self, queues: UserQueues, routers: Routers, now_s: float) -> None:
        """Drive every life on."""
        self.is_due = False
        if not self.settings.drives_lives:
            return
        self._drop_gone(now_s)
        # Before the release: no need of its pool takes a quarantined engine into service.
        for life in self.fleet.lives.values():
            self._steps.keep_out(life, now_s)
        self._release(queues, now_s)
        with self.fleet.indexed():
            self._steps.begin(queues)
            # Those that have waited longest come first: a probe of others may take the last place beside users.
            for life in sorted(self.fleet.ordered(), key=lambda each: each.retry_s):
                if life.is_connected:
                    self._steps.advance(life, routers, now_s)
            self._learning.step(self.settings.probing_max_s, now_s)

    def _drop_gone(self, now_s: float) -> None:
        """Forget replicas without a lease and without a stream."""
        for name, life in list(self.fleet.lives.items()):
            if not life.is_connected and name not in self.fleet.members:
                self.jobs.end_all(life)
                self._ended(life, now_s)
                del self.fleet.lives[name]

    def _release(self, queues: UserQueues, now_s: float) -> None:
        """Call replicas into service that may not be held back any longer."""
        standings = self.fleet.standings(now_s)
        serving = {
            group: [each.process_id for each in found if each.serves] for group, found in standings.items()
        }
        for pool, role in self.fleet.groups():
            last_s = self._released_s.get((pool, role), float("-inf"))
            delay_s = queues.routers.get(pool) if now_s - last_s >= RELEASE_PAUSE_S else None
            other = "decode" if role == "prefill" else "prefill"
            does_other_serve = bool(serving.get((pool, other)))
            if role == "decode" and (pool, other) not in standings:
                does_other_serve = True  # it computes the prompts itself
            do_users_wait = queues.do_users_wait(
                pool, serving.get((pool, role), ()), does_other_role_serve=does_other_serve
            )
            names = released(standings.get((pool, role), ()), delay_s, do_users_wait=do_users_wait)
            if names and delay_s is not None:
                self._released_s[pool, role] = now_s
            is_slow = delay_s is not None and delay_s >= QUEUE_DELAY_MAX_S
            for name in names:
                self._steps.hurry(self.fleet.lives[name], now_s, is_awaited=do_users_wait or is_slow)

    # Boots.

    def _meet(self, process_id: str, boot_id: str, report: pb.ReplicaLife, now_s: float) -> None:
        """Take a report together with the lease of its process. It waits while the lease is not known."""
        member, life = self.fleet.member_of(process_id, boot_id), self.fleet.lives.get(process_id)
        if member is None:
            return
        is_same_boot = life is not None and life.target.boot_id == boot_id
        if life is not None and is_same_boot and life.target.engine_boot_id == report.engine_boot_id:
            self._hear(life, report, now_s)
            return
        self.is_due = True
        if life is not None:
            self.jobs.end_all(life)
            self._ended(life, now_s)
        self.fleet.begin(member, report, now_s)

    def _hear(self, life: Life, report: pb.ReplicaLife, now_s: float) -> None:
        """Take a further report of the same boot and engine."""
        state = state_of(report.state)
        is_news = state is not life.reported or life.is_engine_silent is not report.engine_lost
        self.is_due = self.is_due or is_news or not life.is_connected
        life.reported, life.reported_proved, life.is_connected = state, report.proved, True
        life.is_self_served = report.self_served
        life.hear_engine(now_s, is_silent=report.engine_lost)
        if state is LifeState.SERVING and life.state.is_held:
            self.jobs.end(life)
            life.go(LifeState.SERVING, now_s, "it served by itself, because it heard no leader")
            life.is_proved, life.is_awaited = report.proved, not report.proved
        elif state is LifeState.QUARANTINED and life.state is not LifeState.QUARANTINED:
            self.jobs.end_all(life)
            life.go(LifeState.QUARANTINED, now_s, FOUND_BEFORE)
            remember(self.fleet.quarantined, life.target.engine_boot_id, FOUND_BEFORE)

    def _ended(self, life: Life, now_s: float) -> None:
        """Count a boot that ended in WARMING or SEEDING, or that the work of a pass or a seeding may have ended."""
        if life.state not in (LifeState.WARMING, LifeState.SEEDING) and now_s >= life.risk_end_s:
            return
        what = f" with package {life.package}" if life.package else ""
        self._emit(Told("replica.warm_up_ended", life.name, f"its boot ended in {life.state.name}{what}"))
        if self.boots.failed(life.name, life.package):
            self._on_quarantined(life.package)


def is_well(result: Result) -> bool:
    """Return whether the engine answered everything that a job asked it for."""
    match result:
        case SeedResult():
            return not result.error and not result.failed_prefixes
        case ProbeResult():
            return not result.error and not any(each.error for each in result.answers)
    return not result.error
