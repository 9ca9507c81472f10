"""Replicas and control processes on a virtual clock: real warm-up, real lives, links that break, leases that get lost.

The schedule is a seed. Time is a heap of events. Messages of one stream arrive in order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

from controlplane.actions import Action, AidKind, AppendEvent, WriteAid
from controlplane.warming import Warming
from controlplane.warmup.actions import CancelJob, Order, RunJob
from controlplane.warmup.jobs import Job, PassJob, RecordJob, Result, SeedJob, Target
from controlplane.warmup.packages import Package, ShapeRow, encode, package_name
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member
from kvmesh.replica.life import ReplicaLife, order_of
from tests.simulation.lives.checkers import Checkers
from tests.simulation.lives.job_runner import JobRunner
from tests.simulation.lives.nodes import KEY, OUTPUTS, VERSION, Control, Replica, new_warming, router

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
"""A replica closes a stream without a message for this long."""
DIAL_S = 0.3
LEASE_S = 3.0
DEAD_ANSWER_S = 0.2


class World:
    """See the module. `has_set`: the version has a golden set, so that its golden tokens are known from the start."""

    def __init__(self, seed: int, chance: random.Random, *, has_set: bool, packages: bool) -> None:
        self.seed, self.chance = seed, chance
        self.has_set = has_set
        self.now_s = 1.0
        self.events = 0
        self.log: list[str] = []
        """Audit events and states, for a replay."""
        self.jobs = JobRunner(chance)
        self.replicas: dict[str, Replica] = {}
        self.delays: dict[str, float] = {}
        """Queue delay by pool."""
        self.unplaced: set[str] = set()
        """Pools whose users have no replica of some role."""
        self.has_redis = True
        self.poison: set[str] = set()
        """Packages that crash the engine."""
        self.crash_loops: dict[str, int] = {}
        """Passes that crash the engine of a replica, whatever its package."""
        self.stored: dict[str, bytes] = {}
        """Packages in Redis."""
        self.max_delay_s = 0.3
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrival_s: dict[tuple[str, int, bool], float] = {}
        self.check = Checkers(self)
        self.controls = [Control(f"control-{at}", self._new_warming) for at in range(2)]
        if packages:
            for role in ("prefill", "decode"):
                golden = OUTPUTS if not has_set else ()
                made = Package(
                    name=package_name(role, KEY),
                    model_version=VERSION,
                    role=role,
                    engine_digest=KEY.engine_digest,
                    made_s=self.wall(),
                    made_from="default",
                    shapes=(ShapeRow(8), ShapeRow(32)),
                    golden=golden,
                )
                self.stored[made.name] = encode(made)
        for control in self.controls:
            self._tick(control, control.boots)

    def wall(self) -> float:
        """Return Unix time."""
        return 1_700_000_000.0 + self.now_s

    # Time.

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Run `event` in `delay_s`."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), event))

    def run(self, until_s: float, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run the events up to `until_s`, or until `is_over`, with the checks after each event."""
        while self._heap and self._heap[0][0] <= until_s and not is_over():
            self.now_s, _, event = heapq.heappop(self._heap)
            event()
            self.events += 1
            self.check.after_event()
        self.now_s = max(self.now_s, until_s) if not is_over() else self.now_s

    def note(self, text: str) -> None:
        """Keep a line for a replay."""
        self.log.append(f"{self.now_s:8.3f} {text}")

    # Control processes.

    def leaders(self) -> list[Control]:
        """Return the processes that lead, as replicas can reach them."""
        return [each for each in self.controls if each.is_up and not each.is_paused and each.leads]

    def is_control_known(self) -> bool:
        """True if a control process has a lease."""
        return self.has_redis and any(each.is_up for each in self.controls)

    def lead(self, control: Control) -> None:
        """Let `control` lead."""
        if control.is_up and not control.is_paused and not control.leads:
            control.leads = True
            self.note(f"{control.boot_id} leads")
            self._step(control)

    def step_down(self, control: Control) -> None:
        """End the leadership of `control`; its streams are closed."""
        if control.is_up and control.leads:
            control.leads = False
            self.note(f"{control.boot_id} leads no more")
            control.warming.forget()
            self.act(control)
            self.check.on_step_down(control)
            for replica in self.replicas.values():
                if replica.leader is control:
                    self.cut(replica)

    def crash_control(self, control: Control) -> None:
        """End a control process. It comes back with empty memory."""
        if not control.is_up:
            return
        self.note(f"{control.boot_id} crashes")
        control.is_up = control.leads = False
        for replica in self.replicas.values():
            if replica.leader is control:
                self.cut(replica)
        self.after(self.chance.uniform(1, 5), partial(self._boot_control, control))

    def _boot_control(self, control: Control) -> None:
        control.boot()
        self._tick(control, control.boots)

    def pause(self, control: Control, for_s: float) -> None:
        """Stop a control process for a time. Its events wait."""
        if control.is_up and not control.is_paused:
            control.is_paused = True
            self.note(f"{control.boot_id} pauses for {for_s:.1f} s")
            self.check.on_break(control)
            self.after(for_s, partial(self._resume, control, control.boots))

    def _resume(self, control: Control, boots: int) -> None:
        if control.is_up and control.boots == boots:
            control.is_paused = False
            waiting, control.waiting = control.waiting, []
            for each in waiting:
                each()

    def at(self, control: Control, boots: int, event: Callable[[], None]) -> None:
        """Run `event` at one boot of a control process, after its pause."""
        if not control.is_up or control.boots != boots:
            return
        if control.is_paused:
            control.waiting.append(partial(self.at, control, boots, event))
            return
        event()
        self.act(control)
        self._step(control)

    def members(self) -> list[Member]:
        """Return the leases."""
        leases = [each.lease for each in self.replicas.values() if each.lease is not None]
        return [*leases, *(router(pool) for pool in sorted(self.delays))] if self.has_redis else []

    def _tick(self, control: Control, boots: int) -> None:
        """Read Redis and send heartbeats, once a second."""
        if control.is_up and control.boots == boots:
            self.at(control, boots, partial(self._beat, control))
            self.after(HEARTBEAT_S, partial(self._tick, control, boots))

    def _beat(self, control: Control) -> None:
        control.hear_routers(self.delays, self.unplaced, self.now_s)
        members = self.members()
        control.registry.take(members, self.now_s)
        control.warming.on_members(members, self.now_s)
        if self.has_redis:
            control.warming.on_stored({AidKind.PACKAGE: self.stored}, is_leader=control.leads)
        for replica in self.replicas.values():
            if replica.leader is control:
                self._down(control, replica, None)

    def _step(self, control: Control) -> None:
        """Drive the lives if it is due, and wake up again."""
        if not control.leads or control.is_paused or not control.is_up:
            return
        if self.now_s >= control.warming.next_step_s:
            self.check.before_step(control)
            control.warming.step(control.registry, control.receivers, self.now_s)
            self.act(control)
            self.check.after_step(control)
        wait_s = max(0.0, control.warming.next_step_s - self.now_s) + 1e-6
        if wait_s < HEARTBEAT_S / 2:
            self.after(wait_s, partial(self.at, control, control.boots, lambda: None))

    def act(self, control: Control) -> None:
        """Execute the actions of a control process."""
        for action in control.warming.take_actions():
            self.check.on_action(control, action)
            self._execute(control, action)

    def _execute(self, control: Control, action: Action) -> None:
        match action:
            case Order():
                replica = self.replicas[action.process_id]
                if replica.leader is control and replica.boot_id == action.boot_id:
                    self._down(control, replica, action.order)
            case RunJob():
                self._run_job(control, action.number, action.job)
            case CancelJob():
                control.jobs.pop(action.number, None)
            case WriteAid():
                if self.has_redis:
                    self.stored[action.name] = action.data
            case AppendEvent():
                self.note(f"{control.boot_id}: {action.what} {action.target} {action.result}")
            case _:
                raise AssertionError(f"unknown action {action}")

    # Jobs.

    def _run_job(self, control: Control, number: int, job: Job) -> None:
        control.jobs[number] = job
        took_s = self.jobs.duration_s(job)
        package = ""
        if not isinstance(job, RecordJob) and (life := control.warming.lives.get(job.target.process_id)):
            package = life.package
        if isinstance(job, PassJob) and self.crash_loops.get(job.target.process_id, 0) > 0:
            self.crash_loops[job.target.process_id] -= 1
            self.after(took_s / 2, partial(self._poison, job))
        elif package in self.poison and isinstance(job, PassJob | SeedJob):
            self.after(took_s / 2, partial(self._poison, job))
        end_s = max(0.0, job.end_s - self.now_s)
        done = partial(self._end_job, control, control.boots, number, job, is_late=took_s > end_s)
        self.after(min(took_s, end_s), done)

    def _poison(self, job: PassJob | SeedJob) -> None:
        replica = self._of(job.target)
        if replica is not None:
            self.note(f"{replica.name}: its warm-up crashes {replica.engine}")
            self.crash_engine(replica)

    def _of(self, target: Target) -> Replica | None:
        """Return the replica of a job if that boot still runs."""
        replica = self.replicas[target.process_id]
        is_it = replica.life is not None and replica.boot_id == target.boot_id
        return replica if is_it and replica.engine == target.engine_boot_id else None

    def _end_job(self, control: Control, boots: int, number: int, job: Job, *, is_late: bool) -> None:
        replica = None if isinstance(job, RecordJob) else self._of(job.target)
        if is_late:
            result = self.jobs.failed(job, "no answer in time")
        elif replica is None and not isinstance(job, RecordJob):
            left_s = job.end_s - self.now_s
            wait_s = min(left_s, DEAD_ANSWER_S) if self.chance.random() < 0.7 else left_s
            failed = self.jobs.failed(job, "the stream was lost")
            self.after(max(0.0, wait_s), partial(self._answer, control, boots, number, job, failed))
            return
        else:
            result = self.jobs.result(job, replica)
        self._answer(control, boots, number, job, result)

    def _answer(self, control: Control, boots: int, number: int, job: Job, result: Result) -> None:
        if number not in control.jobs and self.chance.random() < 0.7:
            return  # cancelled in time
        self.at(control, boots, partial(self._take, control, number, job, result))

    def _take(self, control: Control, number: int, job: Job, result: Result) -> None:
        self.check.on_result(control, number, job, result)
        control.jobs.pop(number, None)
        control.warming.on_result(number, result, self.now_s)

    # Replicas.

    def add(self, replica: Replica, *, is_bad: bool) -> None:
        """Add a replica that starts now."""
        self.replicas[replica.name] = replica
        self.delays.setdefault(replica.pool, 0.0)
        self._boot_engine(replica, replica.engines, is_bad=is_bad)
        self._boot(replica, replica.boots)

    def crash_engine(self, replica: Replica, *, is_bad: bool = False) -> None:
        """End an engine. Another boot follows."""
        if replica.engine:
            self.note(f"{replica.name}: {replica.engine} crashes")
            replica.engine = ""
            self.after(
                self.chance.uniform(1, 5),
                partial(self._boot_engine, replica, replica.engines, is_bad=is_bad),
            )

    def _boot_engine(self, replica: Replica, engines: int, *, is_bad: bool) -> None:
        if replica.engines != engines:
            return
        replica.engines += 1
        replica.engine = f"{replica.name}-engine-{replica.engines}"
        replica.is_bad, replica.passes = is_bad, 0
        if is_bad:
            self.check.bad_engines.add(replica.engine)
        self._tell_engine(replica)

    def _tell_engine(self, replica: Replica) -> None:
        if replica.life is not None and replica.engine:
            replica.life.on_engine(replica.engine, self.now_s, is_control_known=self.is_control_known())
            self._changed(replica)

    def crash_service(self, replica: Replica) -> None:
        """End the process of a replica. Another boot follows."""
        if replica.life is not None:
            self.note(f"{replica.name}: the service stops")
            self.cut(replica)
            replica.life = None
            self.after(self.chance.uniform(1, 5), partial(self._boot, replica, replica.boots))
            self.after(LEASE_S, partial(self._expire, replica, replica.boot_id))

    def _expire(self, replica: Replica, boot_id: str) -> None:
        if replica.lease is not None and replica.lease.boot_id == boot_id:
            replica.lease = None

    def _boot(self, replica: Replica, boots: int) -> None:
        if replica.boots != boots or replica.life is not None:
            return
        replica.boots += 1
        replica.life, replica.heard_s = ReplicaLife(self.now_s), float("-inf")
        replica.life.start(self.now_s, is_control_known=self.is_control_known())
        self._tell_engine(replica)
        self._changed(replica)
        self._report(replica, replica.boots)
        self._dial(replica, replica.boots)

    def _changed(self, replica: Replica) -> None:
        """Show the life in the lease, report it, and set the timer."""
        replica.lease = replica.member()
        self.check.on_state(replica)
        self._up(replica)
        self._wait(replica)

    def _wake(self, replica: Replica, boots: int) -> None:
        life = replica.life
        if life is None or replica.boots != boots:
            return
        wake_s = life.next_wake_s()
        if wake_s is not None and self.now_s >= wake_s:
            life.on_timer(self.now_s)
            self._changed(replica)

    def _report(self, replica: Replica, boots: int) -> None:
        """Report once a second. A stream without a message is closed."""
        if replica.boots == boots and replica.life is not None:
            if replica.leader is not None and self.now_s - replica.heard_s >= SILENCE_S:
                self.cut(replica)
            self._up(replica)
            self.after(HEARTBEAT_S, partial(self._report, replica, boots))

    def _dial(self, replica: Replica, boots: int) -> None:
        """Open a stream to a leader."""
        if replica.boots != boots or replica.life is None:
            return
        leaders = self.leaders()
        if replica.leader is None and leaders:
            replica.leader = self.chance.choice(leaders)
            replica.stream += 1
            replica.heard_s = self.now_s
            self._up(replica)
            self._down(replica.leader, replica, None)
        self.after(DIAL_S, partial(self._dial, replica, boots))

    def cut(self, replica: Replica) -> None:
        """Close the stream of a replica. What is under way is lost."""
        control, stream = replica.leader, replica.stream
        if control is not None:
            replica.leader, replica.stream = None, stream + 1
            self.check.on_cut(replica)
            gone = partial(self._gone, control, replica, replica.boot_id, replica.stream)
            self.after(self._delay_s(), partial(self.at, control, control.boots, gone))

    def _gone(self, control: Control, replica: Replica, boot_id: str, stream: int) -> None:
        """Note the end of a stream, unless a later stream of the same boot has replaced it."""
        is_replaced = replica.leader is control and replica.boot_id == boot_id and replica.stream > stream
        if not is_replaced:
            control.warming.on_gone(replica.name, boot_id)

    def _delay_s(self) -> float:
        return self.chance.uniform(0.001, self.max_delay_s)

    def _send(self, replica: Replica, event: Callable[[], None], *, is_up: bool) -> None:
        """Deliver a message in order."""
        key = (replica.name, replica.stream, is_up)
        at_s = max(self.now_s + self._delay_s(), self._arrival_s.get(key, 0.0) + 1e-6)
        self._arrival_s[key] = at_s
        self.after(at_s - self.now_s, event)

    def _up(self, replica: Replica) -> None:
        """Send the life of a replica to its leader."""
        control, life = replica.leader, replica.life
        if control is None or life is None:
            return
        report = life.report(self.now_s, is_engine_lost=not replica.engine)
        hear = partial(self._hear, control, replica, replica.boot_id, replica.stream, report)
        self._send(replica, partial(self.at, control, control.boots, hear), is_up=True)

    def _hear(
        self, control: Control, replica: Replica, boot_id: str, stream: int, report: pb.ReplicaLife
    ) -> None:
        if control.leads and replica.stream == stream:
            control.warming.lives.on_report(replica.name, boot_id, report, self.now_s)
            control.hear_queue(replica, self.now_s)
            self.check.on_report(control, replica, report)

    def _down(self, control: Control, replica: Replica, order: pb.LifeOrder | None) -> None:
        take = partial(self._obey, control, replica, replica.boots, replica.stream, order)
        self._send(replica, take, is_up=False)

    def _obey(
        self, control: Control, replica: Replica, boots: int, stream: int, order: pb.LifeOrder | None
    ) -> None:
        life = replica.life
        if life is None or (replica.boots, replica.stream) != (boots, stream):
            return
        replica.heard_s = self.now_s
        life.on_leader(self.now_s, drives_lives=True)
        made = order_of(order) if order is not None else None
        if made is not None and life.on_order(made, self.now_s):
            self.check.obeyed(replica, made)
            self._changed(replica)
        else:
            self._wait(replica)

    def _wait(self, replica: Replica) -> None:
        """Set the timer of a life."""
        assert replica.life is not None
        wake_s = replica.life.next_wake_s()
        if wake_s is not None:
            self.after(max(0.0, wake_s - self.now_s) + 1e-6, partial(self._wake, replica, replica.boots))

    def _new_warming(self) -> Warming:
        return new_warming(self.wall, has_set=self.has_set)

    def are_proved(self) -> bool:
        """True if every replica serves and is proved."""
        lives = [each.life for each in self.replicas.values()]
        return all(life is not None and life.state is LifeState.SERVING and life.is_proved for life in lives)
