"""Checks of the simulated lives. Each one keeps facts of its own, beside those of the parts under test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.actions import Action, AppendEvent
from controlplane.warmup.actions import CancelJob, Order, RunJob
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.jobs import Job, PassJob, ProbeJob, ProbeResult, ReferenceJob, Result, SeedJob
from controlplane.warmup.life import Life
from controlplane.warmup.life_state import number_of
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.replica.life import Order as Obeyed
from tests.simulation.lives.nodes import KEY, OUTPUTS, PROMPTS, SETTINGS, Control, Replica, router_name

if TYPE_CHECKING:
    from tests.simulation.lives.world import World

# The bounds that the documents promise. They are written again here, so that a change of the code shows.
SELF_SERVE_S = 5.0
QUICK_S, HURRIED_S = 2.0, 3.0
QUEUE_DELAY_MAX_S = 1.0
SERVING_SHARE_MIN = 0.7
WARM_BY_SERVICE_S = 30.0
CANNOT_TELL_S = 2.5
ENGINE_LOST_S = 3.0
BOOTS_WITH_PACKAGE = 2
BOOTS_WITH_SHAPES = 3
SLACK_S = 5.0
HELD_MAX_S = SETTINGS.warming_max_s + SETTINGS.seeding_max_s + SETTINGS.probing_max_s + SLACK_S
PACKAGE_REPLICAS = 2


@dataclass
class Driven:
    """One boot of a replica and its engine, as one boot of a control process drove it."""

    met: int
    """State in the first report."""
    was_known: bool = False
    """True if the engine was in service at the first report."""
    is_alone: bool = False
    """True if a report said SERVING before an order did."""
    ordered: dict[int, float] = field(default_factory=dict)
    """Time of the first order of each state."""
    rank: int = 0
    is_hurried: bool = False
    suspects: set[int] = field(default_factory=set)
    """Golden prompts with wrong answers, since the last probe without one."""


class Checkers:
    """See the module. The world calls it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: Counter[str] = Counter()
        """Cases that the run reached."""
        self.bad_engines: set[str] = set()
        self._served: set[str] = set()
        """Engines that were in service, or were ordered into service."""
        self._driven: dict[tuple[str, str, str, str], Driven] = {}
        self._quarantined: set[tuple[str, str]] = set()
        """Control process and engine whose wrong tokens it found."""
        self._jobs: dict[tuple[str, int], Job] = {}
        self._states: dict[tuple[str, str], LifeState] = {}
        """Last state of each boot of a process with an engine."""
        self._held: dict[tuple[str, str], float] = {}
        """Start of the time held of each boot of a process with an engine."""
        self._contact: dict[str, tuple[str, int, str, float]] = {}
        """Leader, stream and engine of each replica, with the time since which all of it and the lease are unbroken."""
        self._ended: dict[tuple[str, str], int] = {}
        """Boots in a row that ended in their warm-up, by control process and replica."""
        self._ended_ever: Counter[tuple[str, str]] = Counter()
        """The same without the return to 0 by service. The leader returns later to 0: after the last risk."""
        self._ended_with: dict[tuple[str, str], set[str]] = {}
        """Replicas whose boots ended with a package, by control process and package."""
        self._must_quarantine: tuple[Control, str] | None = None
        """Leader and engine after two wrong answers to one prompt."""
        self._condemned: set[tuple[str, str]] = set()
        self._before: dict[str, bool] = {}
        """Replicas with a lease before a step, and whether they serve or are about to."""
        self._warm: set[str] = set()
        """Those of them that are warm."""

    # Events of the world.

    def on_break(self, control: Control) -> None:
        """Note that a control process stopped for a time."""
        for name, (leader, *_) in list(self._contact.items()):
            if leader == control.boot_id:
                del self._contact[name]

    def on_step_down(self, control: Control) -> None:
        """Note that a control process forgot its lives."""
        self._driven = {key: each for key, each in self._driven.items() if key[0] != control.boot_id}

    def on_cut(self, replica: Replica) -> None:
        """Note the end of a stream."""
        self._contact.pop(replica.name, None)

    def on_report(self, control: Control, replica: Replica, report: pb.ReplicaLife) -> None:
        """Note the first report of each boot at a leader."""
        life = control.warming.lives.get(replica.name)
        if life is None or life.target.engine_boot_id != report.engine_boot_id:
            return
        driven = self._of(control, life.name, life.target.boot_id, report.engine_boot_id, report)
        if report.state == pb.REPLICA_STATE_SERVING:
            self._ended.pop((control.boot_id, life.name), None)
        if report.state == pb.REPLICA_STATE_SERVING and pb.REPLICA_STATE_SERVING not in driven.ordered:
            driven.is_alone = True

    def on_result(self, control: Control, number: int, job: Job, result: Result) -> None:
        """Note what a probe found."""
        known = self._jobs.pop((control.boot_id, number), None)
        if known is None or not isinstance(job, ProbeJob) or not isinstance(result, ProbeResult):
            return
        target = job.target
        driven = self._of(control, target.process_id, target.boot_id, target.engine_boot_id)
        if not result.error and self._world.has_set:
            self._note_answers(control, driven, job, result)

    def _note_answers(self, control: Control, driven: Driven, job: ProbeJob, result: ProbeResult) -> None:
        """Note wrong answers. A prompt that is wrong twice has to lead to a quarantine (`after_event`)."""
        wrong, is_complete = set(), len(result.answers) == len(job.prompts)
        for prompt, answer in zip(job.prompts, result.answers, strict=False):
            at = PROMPTS.index(prompt)
            wanted = OUTPUTS[at][:1] if job.target.role == "prefill" else OUTPUTS[at]
            is_complete = is_complete and not answer.error
            if not answer.error and answer.token_ids != wanted:
                wrong.add(at)
        if wrong & driven.suspects:
            self._must_quarantine = (control, job.target.engine_boot_id)
        elif is_complete and not wrong:
            driven.suspects = set()
        driven.suspects |= wrong

    def before_step(self, control: Control) -> None:
        """Note which replicas serve before a step, for the rule that holds replicas back."""
        self._before, self._warm = {}, set()
        fleet = control.warming.lives.fleet
        for member in fleet.members.values():
            life = fleet.lives.get(member.process_id)
            if life is None or life.target.boot_id != member.boot_id:
                self._before[member.process_id] = not member.draining
                self._warm.add(member.process_id)
            else:
                is_shown = life.is_proved or (life.is_warm and not life.is_adopted)
                if is_shown or (life.serves and life.age_s(self._world.now_s) >= WARM_BY_SERVICE_S):
                    self._warm.add(member.process_id)
                self._before[member.process_id] = not self._is_lost(life) and (
                    life.serves or (life.is_hurried and life.state.is_held and life.is_connected)
                )

    def after_step(self, control: Control) -> None:
        """A replica is hurried only while its pool waits too long, or fewer than the share of the others serve.

        The count of the others takes those as serving that serve by the leader's facts before the step. No replica is
        held while users wait and only cold ones serve.
        """
        fleet = control.warming.lives.fleet
        self._check_cold_pools(control)
        for life in fleet.ordered():
            driven = self._of(control, life.name, life.target.boot_id, life.target.engine_boot_id)
            if not life.is_hurried or driven.is_hurried:
                continue
            driven.is_hurried = True
            group = [
                each.process_id
                for each in fleet.members.values()
                if (each.pool, each.role) == (life.target.pool, life.target.role)
                and each.process_id != life.name
            ]
            serving = sum(self._before.get(name, False) for name in group)
            delay_s = self._world.delays.get(life.target.pool, 0.0)
            delays = [
                each.report.queue_delay_us / 1e6
                for each in control.receivers
                if (each.pool, each.role) == (life.target.pool, "router") and each.report is not None
            ]
            is_slow = max([delay_s, *delays]) >= QUEUE_DELAY_MAX_S
            is_share = not group or serving < SERVING_SHARE_MIN * len(group)
            do_users_wait = self._do_users_wait(control, life.target.pool, life.target.role) and not (
                self._warm & self._serving(fleet, life.target.pool, life.target.role)
            )
            cause = "queue" if is_slow else "share" if is_share else "cold peers"
            self.seen[f"hurried by {cause}"] += 1
            assert (
                is_slow
                or do_users_wait
                or not group
                or serving < SERVING_SHARE_MIN * len(group)
                or self._drains(control, group)
            ), f"{life.name} is hurried with {serving} of {len(group)} others in service"

    def _check_cold_pools(self, control: Control) -> None:
        fleet = control.warming.lives.fleet
        for life in fleet.lives.values():
            pool, role = life.target.pool, life.target.role
            has_engine = bool(life.target.engine_boot_id) and not self._is_lost(life)
            is_held = life.state.is_held and life.is_connected and has_engine
            member = fleet.members.get(life.name)
            is_in_use = member is not None and member.state not in ("cordoned", "draining")
            if is_held and is_in_use and not life.is_hurried and self._do_users_wait(control, pool, role):
                warm = self._warm & self._serving(fleet, pool, role)
                assert warm, f"{life.name} is held while users wait and only cold replicas serve"

    def _is_lost(self, life: Life) -> bool:
        """True if its engine has not answered for a while, by the reports."""
        since_s = life.engine_silent_s
        return since_s is not None and self._world.now_s - since_s >= ENGINE_LOST_S

    def _do_users_wait(self, control: Control, pool: str, role: str) -> bool:
        """True if reports say that users wait: for any replica of the role, or at all that served before the step."""
        fleet = control.warming.lives.fleet
        reports = {each.process_id: each.report for each in control.receivers if each.report is not None}
        router = reports.get(router_name(pool))
        others = self._serving(fleet, pool, "decode" if role == "prefill" else "prefill")
        has_prefill = any((each.pool, each.role) == (pool, "prefill") for each in fleet.members.values())
        if not others and (role == "prefill" or has_prefill):
            return False
        if router is not None:
            if max(router.queue_delay_us, router.longest_wait_us) / 1e6 >= QUEUE_DELAY_MAX_S:
                return True
            if router.live_request_count and not router.can_place:
                return True
        serving = self._serving(fleet, pool, role)
        queues = [reports[name].longest_wait_us / 1e6 if name in reports else 0.0 for name in serving]
        return bool(queues) and min(queues) >= QUEUE_DELAY_MAX_S

    def _serving(self, fleet: Fleet, pool: str, role: str) -> set[str]:
        """Return the leased replicas of the role that served before the step."""
        return {
            each.process_id
            for each in fleet.members.values()
            if (each.pool, each.role) == (pool, role) and self._before.get(each.process_id)
        }

    def _drains(self, control: Control, group: list[str]) -> bool:
        """True if a lease in the group contradicts the leader: it drains, while the life serves."""
        fleet = control.warming.lives.fleet
        return any(fleet.members[name].draining for name in group)

    def on_action(self, control: Control, action: Action) -> None:
        """Check an action of a leader."""
        match action:
            case RunJob():
                self._check_one_job(control, action)
            case CancelJob():
                self._jobs.pop((control.boot_id, action.number), None)
            case Order():
                self._check_order(control, action)
            case AppendEvent("replica.quarantined"):
                life = control.warming.lives.get(action.target)
                assert life is not None
                self.seen["quarantined"] += 1
                self._quarantined.add((control.boot_id, life.target.engine_boot_id))
            case AppendEvent("replica.warm_up_ended"):
                self._count_ended(control, action)
            case AppendEvent("package.quarantined"):
                self.seen["package quarantined"] += 1
                self._check_condemned(control, action.target)
            case _:
                pass

    def after_event(self) -> None:
        """Check what holds at each time. Two wrong answers to one golden prompt quarantine an engine."""
        world = self._world
        if self._must_quarantine is not None:
            (control, engine), self._must_quarantine = self._must_quarantine, None
            is_found = (control.boot_id, engine) in self._quarantined
            assert is_found, f"{engine} gave wrong tokens twice to one prompt, and is not quarantined"
        for replica in world.replicas.values():
            self._check_held_time(replica)
            self._check_quarantine_holds(replica)

    # Checks.

    def _check_one_job(self, control: Control, action: RunJob) -> None:
        """A life has at most one job of its own, one seeding beside it, and a replica at most one reference run."""
        job = action.job
        if isinstance(job, PassJob | SeedJob | ProbeJob | ReferenceJob):
            kind = _kind(job)
            others = [
                each
                for (boot, _), each in self._jobs.items()
                if boot == control.boot_id
                and isinstance(each, PassJob | SeedJob | ProbeJob | ReferenceJob)
                and _kind(each) is kind
                and each.target.process_id == job.target.process_id
            ]
            assert not others, f"{job.target.process_id} has two jobs: {others[0]} and {job}"
        self.seen[type(job).__name__] += 1
        self._jobs[control.boot_id, action.number] = job

    def _check_order(self, control: Control, action: Order) -> None:
        """Orders of one leader for one boot go forward only, and never lead an engine with wrong tokens into service.

        After two boots that ended in their warm-up, without service since, a boot has no package; after three it has no
        warm-up. See `_check_unproved` for service.
        """
        order, name = action.order, action.process_id
        driven = self._of(control, name, action.boot_id, order.engine_boot_id)
        assert order.state >= driven.rank, f"{name}: an order goes back from {driven.rank} to {order.state}"
        driven.rank = order.state
        is_first = order.state not in driven.ordered
        driven.ordered.setdefault(order.state, self._world.now_s)
        if order.state == pb.REPLICA_STATE_WARMING and is_first:
            count = self._ended.get((control.boot_id, name), 0)
            assert count < BOOTS_WITH_PACKAGE or not order.package, (
                f"{name}: boot {count + 1} has {order.package}"
            )
            assert count < BOOTS_WITH_SHAPES, f"{name}: boot {count + 1} is warmed up"
            assert (control.boot_id, order.package) not in self._condemned, f"{name} gets {order.package}"
            self.seen["with package"] += bool(order.package)
        if order.state != pb.REPLICA_STATE_SERVING:
            return
        is_found = (control.boot_id, order.engine_boot_id) in self._quarantined
        assert not is_found, f"{name} is ordered into service with wrong tokens"
        if order.proved and order.engine_boot_id in self.bad_engines and self._world.has_set:
            raise AssertionError(f"{name} is proved with wrong tokens")
        if is_first and not order.proved:
            self._check_unproved(control, name, driven, order)
        self._ended.pop((control.boot_id, name), None)
        self.seen["proved" if order.proved else "unproved"] += is_first
        self._served.add(order.engine_boot_id)

    def _check_unproved(self, control: Control, name: str, driven: Driven, order: pb.LifeOrder) -> None:
        """A replica is ordered into service without a proof only for one of these reasons.

        Its engine was in service before. It serves by itself. It was hurried. Its warm-up began under another leader. The
        bound of WARMING or PROBING is over. No golden tokens are known, and for a while no two replicas told them. Its
        earlier boots ended in their warm-up too often. A probe with a failed check ends at the bound of PROBING.
        """
        now_s, times = self._world.now_s, driven.ordered
        probing_s = times.get(pb.REPLICA_STATE_PROBING, now_s)
        warming_s = probing_s - times.get(pb.REPLICA_STATE_WARMING, probing_s)
        probed_s = now_s - probing_s
        life = control.warming.lives.get(name)
        is_short = driven.is_hurried or driven.was_known or (life is not None and life.is_hurried)
        bound_s = (QUICK_S if driven.was_known else HURRIED_S) if is_short else SETTINGS.probing_max_s
        reasons = {
            "known engine": driven.was_known,
            "served by itself": driven.is_alone,
            "hurried": is_short,
            "another leader": driven.met > pb.REPLICA_STATE_STARTING,
            "not warm in time": warming_s >= SETTINGS.warming_max_s,
            "no proof in time": probed_s >= bound_s,
            "no golden tokens": not self._do_others_tell(control, name, probed_s),
            "failed boots": self._ended_ever[control.boot_id, name] >= BOOTS_WITH_SHAPES,
        }
        assert any(reasons.values()), f"{name} serves unproved without a reason: {order.reason}, {driven}"
        for reason, holds in reasons.items():
            self.seen[f"unproved: {reason}"] += holds
        is_bad = order.engine_boot_id in self.bad_engines
        if is_bad and self._world.has_set and driven.met <= pb.REPLICA_STATE_STARTING:
            excuses = ("known engine", "served by itself", "hurried", "no proof in time")
            assert any(reasons[each] for each in excuses), f"the bad {name} serves: {order.reason}"

    def _do_others_tell(self, control: Control, name: str, waited_s: float) -> bool:
        """True if the golden tokens are known, if two serving replicas run the prompts, or may begin to in a moment."""
        fleet = control.warming.lives.fleet
        if control.warming.references.expected(KEY):
            return True
        leased = [each for each in fleet.members.values() if (each.role, each.state) == ("decode", "serving")]
        if len(leased) > 1 and waited_s < CANNOT_TELL_S:
            return True
        able = {each.name for each in fleet.referees(KEY)} - {name}
        running = {
            job.target.process_id
            for (boot, _), job in self._jobs.items()
            if boot == control.boot_id and isinstance(job, ReferenceJob)
        }
        return len(running & able) > 1

    def on_state(self, replica: Replica) -> None:
        """Within one boot of process and engine the state never goes back, and QUARANTINED is the last."""
        life = replica.life
        assert life is not None
        key = (replica.boot_id, life.engine_boot_id)
        before = self._states.get(key, LifeState.STARTING)
        assert life.state.rank >= before.rank, f"{replica.name} goes back from {before} to {life.state}"
        if life.is_proved:
            assert life.state is LifeState.SERVING, f"{replica.name} is proved in {life.state}"
        if key not in self._states or life.state is not before:
            self.seen[f"in {life.state.value}"] += 1
            self._world.note(f"{replica.boot_id}: {life!r} {life.reason}")
        self._states[key] = life.state
        if life.state.is_held:
            self._held.setdefault(key, self._world.now_s)
        else:
            self._held.pop(key, None)
        if life.state is LifeState.SERVING:
            self._served.add(life.engine_boot_id)
            self.seen["alone"] += life.is_self_served

    def obeyed(self, replica: Replica, order: Obeyed) -> None:
        """An order that is obeyed was made for the engine that runs, and has put the replica into its state."""
        life = replica.life
        assert life is not None
        assert order.engine_boot_id == life.engine_boot_id, (
            f"{replica.name} obeys an order for an earlier engine"
        )
        assert life.state is order.state, f"{replica.name} is in {life.state} after {order}"

    def _check_held_time(self, replica: Replica) -> None:
        """A replica is held no longer than SELF_SERVE_S without a message of a leader.

        Under one leader, with a lease and an engine, it is held for no longer than all bounds together and SLACK_S.
        """
        life, now_s = replica.life, self._world.now_s
        if life is None or not life.state.is_held:
            self._contact.pop(replica.name, None)
            return
        key = (replica.boot_id, life.engine_boot_id)
        silent_s = now_s - max(self._held[key], replica.heard_s)
        assert silent_s <= SELF_SERVE_S + 0.01, (
            f"{replica.name} is held for {silent_s:.2f} s without a leader"
        )
        leader = replica.leader
        is_driven = leader is not None and leader.is_up and not leader.is_paused and leader.leads
        if leader is None or not (is_driven and self._world.has_redis and life.engine_boot_id):
            self._contact.pop(replica.name, None)
            return
        wanted = (leader.boot_id, replica.stream, life.engine_boot_id)
        known = self._contact.get(replica.name)
        if known is None or known[:3] != wanted:
            known = self._contact[replica.name] = (*wanted, now_s)
        held_s = now_s - known[3]
        assert held_s <= HELD_MAX_S, f"{replica.name} is held for {held_s:.1f} s: {life!r} {life.reason}"

    def _check_quarantine_holds(self, replica: Replica) -> None:
        """An engine with wrong tokens serves no longer than SLACK_S under the leader that found them."""
        life, leader = replica.life, replica.leader
        is_found = leader is not None and (leader.boot_id, replica.engine) in self._quarantined
        is_driven = leader is not None and leader.is_up and not leader.is_paused and leader.leads
        serves = (
            life is not None and life.state is LifeState.SERVING and life.engine_boot_id == replica.engine
        )
        key = f"quarantine {replica.name}"
        if leader is None or not (
            is_found and is_driven and serves and self._world.has_redis and replica.engine
        ):
            self._contact.pop(key, None)
            return
        wanted = (leader.boot_id, replica.stream, replica.engine)
        known = self._contact.get(key)
        if known is None or known[:3] != wanted:
            known = self._contact[key] = (*wanted, self._world.now_s)
        served_s = self._world.now_s - known[3]
        assert served_s <= SLACK_S, f"{replica.name} serves for {served_s:.1f} s with wrong tokens"

    def _count_ended(self, control: Control, action: AppendEvent) -> None:
        self.seen["boot ended"] += 1
        key = (control.boot_id, action.target)
        self._ended[key] = self._ended.get(key, 0) + 1
        self._ended_ever[key] += 1
        _, _, package = action.result.partition(" with package ")
        if package:
            self._ended_with.setdefault((control.boot_id, package), set()).add(action.target)

    def _check_condemned(self, control: Control, package: str) -> None:
        """A package is quarantined after boots of two replicas ended with it, and is usable no more."""
        replicas = self._ended_with.get((control.boot_id, package), set())
        assert len(replicas) >= PACKAGE_REPLICAS, f"{package} is quarantined after {replicas}"
        found = control.warming.packages.named(package)
        assert found is None or found.quarantined, f"{package} is not quarantined"
        self._condemned.add((control.boot_id, package))

    def _of(
        self, control: Control, name: str, boot_id: str, engine: str, report: pb.ReplicaLife | None = None
    ) -> Driven:
        key = (control.boot_id, name, boot_id, engine)
        driven = self._driven.get(key)
        if driven is None:
            life = control.warming.lives.get(name)
            met = (
                int(report.state)
                if report is not None
                else int(number_of(life.reported))
                if life is not None
                else 0
            )
            driven = self._driven[key] = Driven(met, was_known=engine in self._served)
            driven.rank = met
        return driven


def _kind(job: Job) -> type[Job]:
    """Return the kind of which a replica has one job at a time: seedings and references are apart."""
    return type(job) if isinstance(job, SeedJob | ReferenceJob) else PassJob
