"""The core of one control process: leadership, receivers, documents, the running rollout, the snapshot in force. Pure.

Events come in as method calls with the time; actions go out through `take_actions`. The shell executes them in order and
reports their results as further events. `now_s` is the process's monotonic clock; `wall` gives Unix time, which may jump.

INVARIANT: a snapshot that moves traffic forward is published only by a leader with a certain lease, after the document that
asks for it was written. INVARIANT: a step back needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from controlplane import takeover
from controlplane.actions import (
    Action,
    AppendEvent,
    ClaimLease,
    Confirm,
    Done,
    ReadStore,
    ReleaseLease,
    RunGolden,
    Send,
    WriteBoard,
)
from controlplane.command_queue import Command, CommandQueue
from controlplane.document_writes import DocumentWrites, Outcome, Write
from controlplane.early_observations import EarlyObservations
from controlplane.ended_rollouts import EndedRollouts
from controlplane.facts import frontend_facts, nacks
from controlplane.judging import Judging, with_golden
from controlplane.leadership import TAKEOVER_S, Leadership, LeaderState, LeaseAnswer
from controlplane.library import Library, StoreRead
from controlplane.observing import tracks_of
from controlplane.pools.registry import Registry, is_of
from controlplane.publishing import Authority, Cause, Publishing
from controlplane.region_control import RegionControl
from controlplane.regions.news import News, RolloutNews
from controlplane.rollouts import machine
from controlplane.rollouts.commands import CommandRefused
from controlplane.rollouts.document import OBSERVED, RolloutDocument
from controlplane.rollouts.settings import Expectation
from controlplane.rollouts.verdict import NO_VERDICT
from controlplane.rollouts.view import GoldenFacts, RegionRollout, ShadowFacts, View
from controlplane.shadow import before_rollout
from controlplane.shadow.order import shadows_in
from controlplane.shadow.settings import check_mesh
from controlplane.shadow.tracking import ShadowTracking
from controlplane.snapshots.publisher import Publisher
from controlplane.snapshots.receivers import Receiver, Receivers
from controlplane.warming import Warming, idle_warming
from controlplane.warmup.jobs import Result
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.published import NO_NAME, Name, Published, Term
from kvmesh.snapshot.regions import RegionEntry

ONE_MODEL: Final[Mapping[str, str]] = MappingProxyType({})
"""Model by version in a mesh with one model."""

TICK_S: Final = 1.0
"""Time between two decisions without an event."""

STEP_S: Final = 0.2
"""Shortest time between two steps of the rollout. Acknowledgements arrive in bursts."""

READ_S: Final = 1.0
"""Time between two reads of Redis. Followers read too, so that each has a copy of every document."""

READS_MIN: Final = 2
"""Reads of Redis before a takeover ends. A write of the term before may have followed the first one."""

NOT_LEADER: Final = "this process does not lead"
NO_REDIS: Final = "Redis does not answer, so nothing was changed"
UNKNOWN: Final = "Redis did not answer in time: look whether the change is in force before you try again"
CONFLICT: Final = "another leader changed it at the same time; try again"
TOO_LARGE: Final = "the document is too large, so nothing was changed"

_ERRORS: Final = {
    Outcome.TOO_LARGE: TOO_LARGE,
    Outcome.CONFLICT: CONFLICT,
    Outcome.UNKNOWN: UNKNOWN,
}
"""Error of the command whose write had this outcome."""


class Golden(Protocol):
    """The runs of the golden prompts."""

    def due(self, document: RolloutDocument, members: Iterable[Member], now_s: float) -> list[RunGolden]:
        """Return the runs to start now."""
        ...

    def facts(self, document: RolloutDocument) -> GoldenFacts:
        """Return the result for the present step."""
        ...


class ControlCore:
    """See the module. One for each control process.

    `versions`: model version by configured pool. `models`: model by model version; a version that it lacks is one of the
    model of `initial`.
    """

    def __init__(
        self,
        process_id: str,
        boot_id: str,
        versions: Mapping[str, str],
        initial: Content,
        wall: Callable[[], float],
        golden: Golden,
        judge: Callable[[RolloutDocument, float], Judging] = Judging,
        warming: Warming | None = None,
        regions: RegionControl | None = None,
        models: Mapping[str, str] = ONE_MODEL,
    ) -> None:
        """`warming`: the warm-up of replicas. None: replicas serve at once. `regions`: None in a mesh without regions."""
        self.leadership = Leadership(process_id, boot_id)
        self.receivers = Receivers()
        self.registry = Registry()
        self.library = Library()
        self.publisher = Publisher(initial)
        self.shadows = ShadowTracking()
        self.judging: Judging | None = None
        """The judge of the running rollout, at the leader."""
        self.has_redis = False
        """True while Redis answers."""
        self.observed_s = float("-inf")
        """Time of the last observations."""
        self._golden = golden
        self._judge = judge
        self.initial = initial
        """The content of a mesh without any snapshot."""
        self._versions = dict(versions)
        self._models = dict(models)
        self._wall = wall
        self._ended = EndedRollouts()
        self._commands = CommandQueue()
        self._early = EarlyObservations()
        self._actions: list[Action] = []
        self._writes = DocumentWrites(self.library, self._emit)
        self._publishing = Publishing(
            self.publisher, self.library, self.receivers, self._versions, self._emit
        )
        self.warming = warming or idle_warming(wall)
        self.regions = regions
        self._next_read_s = self._next_tick_s = self._next_step_s = float("-inf")
        self._reads = 0
        """Reads of Redis since the term began. The first may have been under way before."""
        self._was_leader = False
        """True from the end of the first takeover until this process follows again. Its documents are in force."""

    # Views.

    @property
    def leads(self) -> bool:
        """True while this process leads, also during its takeover."""
        return self.leadership.leads

    @property
    def content(self) -> Content:
        """The content in force, as far as this process knows."""
        return self.publisher.content

    def versions(self) -> dict[str, str]:
        """Return the model version of each configured pool. Another pool with a lease gets no traffic."""
        return dict(self._versions)

    def of_other_models(self) -> dict[str, str]:
        """Return the model of each configured pool that serves another model than the stable pool does.

        No rollout, shadow or revert leads there: the users of a model stay with it.
        """
        initial = self._models.get(self.initial.stable.model_version, "")
        stable = self._models.get(self.content.stable.model_version, initial)
        models = {pool: self._models.get(version, initial) for pool, version in self._versions.items()}
        return {pool: model for pool, model in models.items() if model != stable}

    def _served_versions(self) -> dict[str, str]:
        """Return the model version that each pool must have. A running rollout goes on with those of its start."""
        running = self.library.running
        return self._versions | (running.versions if running is not None else {})

    def view(self, now_s: float) -> View:
        """Return the facts by which the running rollout is decided."""
        wall_s, document, judging = self._wall(), self.library.running, self.judging
        name = self.publisher.carrier(document) if document is not None else NO_NAME
        latest = self.publisher.published
        is_judged = judging is not None and document is not None and judging.rollout == document.id
        others = [each.id for each in self.library.rollouts if not each.is_final and each != document]
        golden = self._golden.facts(document) if document is not None else GoldenFacts()
        verdict = judging.verdict(wall_s) if judging is not None and is_judged else NO_VERDICT
        return View(
            pools=self.registry.facts(
                self._served_versions(), self.receivers, self.library.desired.content_cordons()
            ),
            frontends=frontend_facts(self.receivers, name, now_s),
            incapable=self.registry.incapable(),
            nacks=nacks(self.receivers, name, latest.name if latest is not None else NO_NAME),
            is_published=name != NO_NAME,
            verdict=with_golden(verdict, golden),
            verdict_step=judging.step if judging is not None and is_judged else 0,
            golden=golden,
            shadow=self._shadow_facts(document),
            frozen_s=max(0.0, self.library.desired.frozen_until_s - wall_s),
            has_redis=self.has_redis,
            has_lease=self.leadership.may_go_forward(now_s),
            other_rollout=next(iter(others), ""),
            ended_rollouts=frozenset(self._ended),
            elsewhere=self._rollouts_elsewhere(now_s),
            unheard=self.regions.unheard(now_s) if self.regions is not None else (),
        )

    def _rollouts_elsewhere(self, now_s: float) -> tuple[RegionRollout, ...]:
        found = self.regions.rollouts(now_s) if self.regions is not None else {}
        return tuple(
            RegionRollout(region, each.state, each.to_version, each.is_final, each.age_s)
            for region, each in sorted(found.items())
        )

    def _shadow_facts(self, document: RolloutDocument | None) -> ShadowFacts:
        if document is None or not document.settings.shadow_permille:
            return ShadowFacts()
        has_other_tokens = document.settings.expectation is Expectation.DIFFERENT
        return self.shadows.facts(document.id, has_other_tokens=has_other_tokens)

    # Time and Redis.

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions, self._actions = [*self._actions, *self.warming.take_actions()], []
        return [*actions, *self.regions.take_actions()] if self.regions is not None else actions

    def next_wake_s(self) -> float:
        """Return the time of the next `on_timer`."""
        times = [self._next_tick_s, self._next_read_s, self.leadership.next_claim_s()]
        return min([*times, self.warming.next_step_s] if self.leads else times)

    def on_timer(self, now_s: float) -> None:
        """Claim the lease, read Redis, decide."""
        if now_s >= self.leadership.next_claim_s():
            self._actions.append(ClaimLease(self.leadership.claim(now_s)))
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + READ_S
            self._actions.append(ReadStore())
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._advance(now_s)
        self._warm_up(now_s)

    def on_lease(self, answer: LeaseAnswer | None, sent_s: float, now_s: float) -> None:
        """Take the answer to a claim that was sent at `sent_s`; None: Redis did not answer."""
        self.has_redis = answer is not None
        led = self.leads
        if self.leadership.take(answer, sent_s, now_s):
            self._begin_term(now_s)
        elif led and not self.leads:
            self._step_down()

    def on_store(self, read: StoreRead | None, now_s: float) -> None:
        """Take the answer to a read; None: Redis did not answer."""
        self.has_redis = read is not None
        if read is None:
            return
        known = {each.id: each for each in self.library.rollouts}
        self.library.learn(read, is_leader=self.leads)
        self.warming.on_stored(read.aids, is_leader=self.leadership.state is LeaderState.LEADER)
        self.shadows.learn(read.shadows, is_leader=self.leads)
        self._reads += 1
        self._hear(Term(read.number, ""), now_s)
        if read.board is not None:
            self._see(read.board, now_s)
        found = [each for each in self.library.rollouts if known.get(each.id) is not each]
        if found and self.leadership.state is LeaderState.LEADER:
            self._reconcile()  # another process put a document, or a later revision, back from its state folder
        if self.leads and self._writes.is_idle and (unwritten := self.library.unwritten(read)) is not None:
            self._actions.append(unwritten)
        latest = self.publisher.latest
        if latest is not None and (read.board is None or read.board.name.order < latest.name.order):
            self._actions.append(WriteBoard(latest))
        self._advance(now_s)

    def on_written(self, number: int, is_written: bool | None, now_s: float) -> None:
        """Take the result of write `number`. False: a conflict. None: Redis did not answer."""
        self.has_redis = is_written is not None
        ended = self._writes.end(number, is_written)
        if ended is None:
            return
        write, outcome = ended
        if outcome.counts:
            self._adopt(write, is_written=outcome is Outcome.WRITTEN)
            self._advance(now_s)
        self._decide(write, outcome)
        self._next_read_s = now_s

    def release(self) -> None:
        """Give the leadership up, at a graceful shutdown."""
        if self.leads:
            self.leadership.step_down()
            self._step_down()
            self._actions.append(ReleaseLease())

    # Leases and receivers.

    def on_members(self, members: list[Member], now_s: float) -> None:
        """Take the leases."""
        boots = self.registry.take(members, now_s)
        self.receivers.list_members(members, now_s)
        self.warming.on_members(members, now_s)
        if self.judging is not None:
            wall_s, versions = self._wall(), self._served_versions()
            counted = [boot for boot in boots if is_of(boot.model_version, versions.get(boot.pool))]
            self.judging.boots([replace(boot, at_s=wall_s) for boot in counted], tracks_of(self.content))
        self._advance(now_s)

    def on_hello(
        self, receiver: Receiver, snapshot: Published | None, ended: Iterable[str], now_s: float
    ) -> None:
        """Take a receiver that opened its stream, with the snapshot in force there."""
        self.receivers.hello(receiver, now_s)
        self._ended.note(ended)
        if snapshot is not None:
            receiver.applied = snapshot.name
            self._see(snapshot, now_s)
        self._hear(receiver.highest_term, now_s, is_foreign=self.publisher.published is None)
        published = self.publisher.published
        if published is not None:
            self._actions.append(Send(receiver.process_id, receiver.boot_id, published))
        self._advance(now_s)

    def on_applied(self, receiver: Receiver, name: Name, now_s: float) -> None:
        """Take an acknowledgement."""
        self.receivers.applied(receiver, name, now_s)
        self._hear(name.term, now_s, is_foreign=self.publisher.is_foreign(name))
        self._advance(now_s)

    def on_rejected(
        self, receiver: Receiver, name: Name, reason: str, highest_term: Term, now_s: float
    ) -> None:
        """Take a refusal. It is audited once for each snapshot of this leader: a receiver may repeat it without end."""
        if not self.publisher.is_foreign(name) and name.order > receiver.rejected.order:
            self._event("snapshot.rejected", receiver.process_id, f"{name}: {reason}")
        self.receivers.rejects(receiver, name, reason, now_s)
        self._hear(highest_term, now_s)
        self._advance(now_s)

    def on_report(self, receiver: Receiver, report: pb.ReceiverReport, now_s: float) -> None:
        """Take the state of a receiver."""
        receiver.report, receiver.heard_s = report, now_s
        self.warming.on_report(receiver, report, now_s)
        self._warm_up(now_s)
        if self.judging is not None:
            track = tracks_of(self.content).get(receiver.pool)
            self.judging.report(receiver, track, self._wall())

    def on_observations(self, receiver: Receiver, batch: pb.ObservationBatch, now_s: float) -> None:
        """Take the observations of a frontend. What the judge does not need, or refuses, is confirmed at once."""
        receiver.heard_s = self.observed_s = now_s
        if self.leadership.state is LeaderState.TAKING_OVER and not self._was_leader:
            self._early.keep(receiver, batch, now_s)
            return
        document, judging = self.library.running, self._judge_running()
        frontend = f"{receiver.process_id}/{receiver.boot_id}"
        is_kept = (
            judging is not None
            and document is not None
            and document.state in OBSERVED
            and judging.observe(batch, frontend, tracks_of(self.content), self._wall())
        )
        if not is_kept:
            self._actions.append(Confirm(receiver.process_id, receiver.boot_id, batch.sequence))

    def on_shadows(
        self, receiver: Receiver, reports: Iterable[shadow_pb2.ShadowReport], now_s: float
    ) -> None:
        """Take a frontend's counts of shadow traffic."""
        receiver.heard_s = now_s
        for report in reports:
            self.shadows.report(receiver.process_id, report)

    def on_gone(self, process_id: str, boot_id: str) -> None:
        """Note the end of a receiver's stream."""
        self.receivers.gone(process_id, boot_id)
        self.warming.on_gone(process_id, boot_id)

    def on_job(self, number: int, result: Result, now_s: float) -> None:
        """Take the result of a job of a warm-up."""
        self.warming.on_result(number, result, now_s)
        self._warm_up(now_s)

    # Regions.

    def on_region_news(self, news: News, now_s: float) -> None:
        """Take news of another region. A process that does not lead ignores them."""
        if self.leads and self.regions is not None and self.regions.on_news(news, now_s):
            self._advance(now_s)

    def _step_regions(self, now_s: float) -> None:
        """Decide about regions, and write down what peers declared."""
        regions = self.regions
        if regions is None or self.leadership.state is not LeaderState.LEADER:
            return
        desired = self.library.desired
        regions.take_orders(desired.regions, now_s)
        regions.rollout = self._rollout_news()
        regions.step(self.registry, self.receivers, self.content, now_s)
        regions.take_busy(self.registry.busy(self.receivers), now_s)
        orders = regions.wanted_orders(desired.regions, now_s)
        if orders != desired.regions and self._writes.is_idle and self.has_redis:
            self._begin_write(Write(desired.with_regions(orders), is_back=True))

    def _rollout_news(self) -> RolloutNews | None:
        """Return the running rollout, else the last one, for other regions."""
        document = self.library.current
        if document is None:
            return None
        age_s = max(0.0, self._wall() - document.changed_s) if document.is_final else document.timing.state_s
        return RolloutNews(document.state_name, document.to_version, document.is_final, age_s)

    def live_requests(self) -> int:
        """Return the open requests of the frontends that report."""
        reports = [each.report for each in self.receivers if each.is_connected and each.role == "frontend"]
        return sum(report.live_request_count for report in reports if report is not None)

    # Commands.

    def command(self, command: Command, now_s: float) -> None:
        """Queue a command. `Done` with its ticket follows. Raises CommandRefused if nothing can be queued."""
        if not self.leads:
            raise CommandRefused(NOT_LEADER)
        if not self.has_redis and not command.is_back:
            raise CommandRefused(NO_REDIS)
        self._commands.add(command)
        self._advance(now_s)

    def _run_command(self, now_s: float) -> None:
        while self._writes.is_idle and (command := self._next_command()) is not None:
            # The command decides by what the one before it has changed.
            if self.regions is not None and self.leadership.state is LeaderState.LEADER:
                self.regions.take_orders(self.library.desired.regions, now_s)
            self._publish(now_s)
            try:
                document = command.make(now_s)
            except CommandRefused as error:
                self._decided(command, str(error))
                continue
            self._begin_write(Write(document, command.is_back, command))

    def _next_command(self) -> Command | None:
        """Return the first command that may run now. During a takeover that is one that only moves traffic back."""
        return self._commands.take(only_back=self.leadership.state is not LeaderState.LEADER)

    # Decisions.

    def _advance(self, now_s: float) -> None:
        """Do all that is due: end the takeover, run commands, step the rollout, publish."""
        if not self.leads:
            return
        if self.leadership.state is LeaderState.TAKING_OVER and self._is_informed(now_s):
            self._finish_takeover(now_s)
        self._run_command(now_s)
        self._step_rollout(now_s)
        self._step_shadow(now_s)
        self._step_regions(now_s)
        self._publish(now_s)
        self._warm_up(now_s)
        if self.leadership.state is LeaderState.LEADER:
            for receiver, batch in self._early.take(now_s):
                self.on_observations(receiver, batch, now_s)

    def _warm_up(self, now_s: float) -> None:
        """Drive the lives of replicas on. A takeover does not wait: a held replica must hear its leader soon."""
        if self.leads and now_s >= self.warming.next_step_s:
            self.warming.step(self.registry, self.receivers, now_s)

    def _is_informed(self, now_s: float) -> bool:
        """True if the takeover may end: Redis was read, and all that answer were heard."""
        if self._reads < READS_MIN:
            return False
        if now_s - self.leadership.taken_s >= TAKEOVER_S:
            return True
        names = [each.process_id for each in self.registry.ordered() if each.role in ("frontend", "router")]
        heard = {each.process_id for each in self.receivers if each.is_connected}
        return bool(names) and heard.issuperset(names)

    def _begin_term(self, now_s: float) -> None:
        self.publisher.begin_term()
        self._reads, self._next_read_s = 0, now_s
        self._drop_write()
        self._publishing.cause = Cause("a new leader")
        self._event("leader.takeover", str(self.leadership.term), "this process leads")

    def _finish_takeover(self, now_s: float) -> None:
        self.leadership.finish_takeover()
        self._was_leader = True
        self._condemn_orphan()
        self._reconcile()
        if self.regions is not None:  # before a command that waited
            self.regions.begin_term(self.content, self.library.desired.regions, now_s)

    def _reconcile(self) -> None:
        """Reconcile the documents with the highest snapshot that was found (`takeover`)."""
        highest, library = self.publisher.highest, self.library
        base = highest.content if highest is not None else None
        for found in takeover.reconcile(library.rollouts, base, frozenset(self._ended), self._wall()):
            library.adopt(found)
            self._event("rollout.takeover", found.id, found.reason)

    def _condemn_orphan(self) -> None:
        """Take a rollout back whose document is lost. Redis was read, so no copy is left there."""
        highest = self.publisher.highest
        if highest is None:
            return
        orphan = takeover.orphan([each.id for each in self.library.rollouts], highest.content)
        if orphan and orphan not in self._ended:
            self._ended.note([orphan])
            self._event("rollout.lost", orphan, "its document is lost, so all traffic goes to stable")

    def _step_down(self) -> None:
        self.publisher.begin_term()
        self.receivers.forget_all()
        self.judging, self._was_leader = None, False
        self.warming.forget()
        if self.regions is not None:
            self.regions.forget()
        self._early.clear()
        self._drop_write()
        for command in self._commands.clear():
            self._decided(command, NOT_LEADER)
        self._event("leader.ended", self.leadership.holder.process_id if self.leadership.holder else "", "")

    def _drop_write(self) -> None:
        if (command := self._writes.drop()) is not None:
            self._decided(command, UNKNOWN)

    def _step_rollout(self, now_s: float) -> None:
        """Run the state machine of the running rollout, and write its document.

        A leader that takes over from itself goes on with it, but only back.
        """
        document, judging = self.library.running, self._judge_running()
        if document is None or judging is None or not self._writes.is_idle or now_s < self._next_step_s:
            return
        self._next_step_s = now_s + STEP_S
        wall_s, is_leader = self._wall(), self.leadership.state is LeaderState.LEADER
        judging.follow(document, wall_s)
        decision = machine.step(document, self.view(now_s), wall_s)
        if decision.runs_golden and is_leader:
            self._actions += self._golden.due(document, self.registry.serving(self._served_versions()), now_s)
        after = decision.document
        if after is None or not (is_leader or after.is_taken_back):
            return
        confirmed: Mapping[str, int] = {}
        if after.state not in OBSERVED:
            after = msgspec.structs.replace(after, judge="")
        elif (saved := judging.save(wall_s)) is not None:
            judge, confirmed = saved
            after = msgspec.structs.replace(after, judge=judge)
        self._begin_write(Write(after, after.is_taken_back, confirmed=confirmed))

    def _step_shadow(self, now_s: float) -> None:
        """End the running shadow if it is due, and write the results of shadows."""
        if self.leadership.state is not LeaderState.LEADER:
            return
        wall_s, desired, running = self._wall(), self.library.desired, self.library.running
        order = desired.shadow
        self.shadows.follow(order, wall_s)
        if order is not None and self._writes.is_idle:
            is_fit = bool(shadows_in(replace(self.content, shadows=()), order))
            reason = self.shadows.end_of(order, wall_s, running, is_fit=is_fit)
            if reason:
                self.shadows.end_reason = reason
                self._event("shadow.ended", order.id, reason)
                self._begin_write(Write(desired.with_shadow(None), is_back=True))
        elif order is None and running is not None and self._writes.is_idle:
            self._start_shadow(running, now_s, wall_s)
        self.shadows.expire(wall_s)
        if self.has_redis and (write := self.shadows.due(now_s)) is not None:
            self._actions.append(write)

    def _start_shadow(self, document: RolloutDocument, now_s: float, wall_s: float) -> None:
        """Start the shadow before the first step of a rollout, once its arms are ready. One that cannot start waits."""
        pools = {document.to_pool, document.settings.baseline_pool}
        golden = self._golden.facts(document).state
        is_proving = self.warming.lives.proves(pools, now_s, before_rollout.PROOF_MAX_S)
        if not before_rollout.is_wanted(document, golden, is_proving=is_proving):
            return
        if self.shadows.of_rollout(document.id) is not None or not self.leadership.may_go_forward(now_s):
            return
        order = before_rollout.order_of(document, before_rollout.name_of(document), wall_s)
        try:
            check_mesh(order, self.registry.ordered(), self.view(now_s).pools)
        except CommandRefused:
            return
        self._event("shadow.started", order.id, f"before the first step of {document.id}")
        self._begin_write(Write(self.library.desired.with_shadow(order), is_back=False))

    def _judge_running(self) -> Judging | None:
        """Return the judge of the running rollout. None: there is no rollout, or it is not known yet."""
        document = self.library.running
        if document is None or not (self.leads and self._was_leader):
            return None
        if self.judging is None or self.judging.rollout != document.id:
            self.judging = self._judge(document, self._wall())
            self.judging.follow(document, self._wall())
        return self.judging

    def _begin_write(self, write: Write) -> None:
        write, outcome = self._writes.begin(write, has_redis=self.has_redis)
        if outcome.counts:
            self._adopt(write, is_written=False)
        if outcome is not Outcome.UNDER_WAY:
            self._decide(write, outcome)

    def _adopt(self, write: Write, *, is_written: bool) -> None:
        """Take the document of a write. Observations are confirmed if it was written."""
        document, command = write.document, write.command
        before = self.library.rollout(document.id) if isinstance(document, RolloutDocument) else None
        self.library.adopt(document)
        if isinstance(document, RolloutDocument):
            if before is None or before.state_name != document.state_name or before.step != document.step:
                self._publishing.cause = Cause(document.reason)
                what = f"{document.state_name} at step {document.step}: {document.reason}"
                self._event("rollout.changed", document.id, what)
            if document.is_final:
                self.judging = None
        if command is not None:
            self._publishing.cause = Cause(command.reason or command.what, command.author.name)
        for frontend, sequence in write.confirmed.items() if is_written else ():
            process_id, _, boot_id = frontend.rpartition("/")
            self._actions.append(Confirm(process_id, boot_id, sequence))

    def _publish(self, now_s: float) -> None:
        is_leader = self.leadership.state is LeaderState.LEADER
        authority = Authority(
            may_go_forward=self.leadership.may_go_forward(now_s) and self.has_redis,
            knows_documents=is_leader,
            knows_running=self._was_leader or self._reads > 0,
        )
        self._publishing.publish(
            self.leadership.term, self._ended, authority, now_s, self._wall(), self._regions(now_s)
        )

    def _regions(self, now_s: float) -> tuple[RegionEntry, ...]:
        """Return the regions to publish. Until the takeover is over, those in force."""
        if self.regions is None:
            return ()
        is_leader = self.leadership.state is LeaderState.LEADER
        return self.regions.entries(now_s) if is_leader and self.regions.is_begun else self.content.regions

    # Snapshots of other leaders and of receivers.

    def _see(self, snapshot: Published, now_s: float) -> None:
        is_foreign = self.publisher.is_foreign(snapshot.name)
        self._ended.see(snapshot)
        self.publisher.see(snapshot)
        self._hear(snapshot.name.term, now_s, is_foreign=is_foreign)

    def _hear(self, term: Term, now_s: float, *, is_foreign: bool = False) -> None:
        """Take a number above a term that this leader cannot supersede: another leader was there.

        A leader with a lease in doubt steps down instead, so that its receivers dial the other one.
        """
        if not self.leadership.hear(term, is_foreign=is_foreign):
            return
        if self.leadership.is_in_doubt(now_s):  # another process holds the lease: receivers must find it
            self.leadership.step_down()
            self._step_down()
        else:
            self._event("leader.superseded", str(term), "a higher term was seen, so a new term begins")
            self.leadership.begin_term(now_s)
            self._begin_term(now_s)

    # Results.

    def _decide(self, write: Write, outcome: Outcome) -> None:
        if write.command is not None:
            self._decided(write.command, _ERRORS.get(outcome, ""))

    def _decided(self, command: Command, error: str) -> None:
        author = command.author
        details = dict(command.details) | ({"reason": command.reason} if command.reason else {})
        result = "done" if not error else error if error == UNKNOWN else refused(error)
        self._actions.append(Done(command.ticket, error))
        self._actions.append(
            AppendEvent(command.what, command.target, result, author.name, author.source, details)
        )

    def _event(self, what: str, target: str, result: str) -> None:
        self._emit(AppendEvent(what, target, result))

    def _emit(self, action: Action) -> None:
        self._actions.append(action)


def refused(error: str) -> str:
    """Return the result of a refused command, for the audit."""
    return f"refused: {error}"
