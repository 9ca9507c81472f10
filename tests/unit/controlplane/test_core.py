"""The core under inputs that once wedged or misled it. The simulation has the schedules of faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from msgspec.structs import replace as changed

from controlplane.actions import (
    AppendEvent,
    Confirm,
    DocumentKind,
    Done,
    ReadStore,
    RunGolden,
    Send,
    WriteDocument,
)
from controlplane.command_queue import Author, Command
from controlplane.core import NOT_LEADER, ONE_MODEL, UNKNOWN, ControlCore
from controlplane.judging import Judging
from controlplane.leadership import Holder, LeaderState, LeaseAnswer
from controlplane.library import Document, StoreRead
from controlplane.operators import Operators
from controlplane.region_control import RegionControl, RegionNames
from controlplane.region_operators import RegionOperators
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import RegionOrders
from controlplane.rollouts import commands, transitions
from controlplane.rollouts import document as documents
from controlplane.rollouts.commands import CommandRefused
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.judge.observation import CANARY
from controlplane.rollouts.view import GoldenFacts, GoldenState
from controlplane.snapshots.desired import CordonEntry, Desired, encode
from controlplane.snapshots.publication import wanted
from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import region_pb2 as region_pb
from kvmesh.control.v1 import snapshot_pb2 as pb_snapshot
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.fence import Applied, Fence, Rejected
from kvmesh.snapshot.published import JUMP_MAX, NO_TERM, Name, Published, Term, publish
from tests.unit.controlplane.test_takeover import CALM, VERSIONS, baking, content_of

OWN = Holder("control-0", "boot", "a:1")
BACK = transitions.taken_back(baking(2, 50), "fails", 1005.0)


def earlier(document: RolloutDocument) -> RolloutDocument:
    """Return `document` as the rollout r0, which began before r1."""
    return changed(document, id="r0", origin=changed(document.origin, started_s=500.0))


class Green:
    """Golden prompts that pass."""

    def due(self, document: RolloutDocument, members: Iterable[Member], now_s: float) -> list[RunGolden]:
        """Return nothing to run."""
        return []

    def facts(self, document: RolloutDocument) -> GoldenFacts:
        """Return a pass."""
        return GoldenFacts(document.step, GoldenState.GREEN)


class Driver:
    """A core with a Redis that answers at once, unless a test answers itself."""

    def __init__(
        self,
        *stored: RolloutDocument,
        board: Published | None = None,
        frontends: tuple[str, ...] = (),
        models: Mapping[str, str] = ONE_MODEL,
    ) -> None:
        """`frontends`: those with a lease. `models`: model by version."""
        self.now_s = 0.0
        self.frontends = frontends
        self.events: list[AppendEvent] = []
        self.core = ControlCore(
            *("control-0", "boot", VERSIONS, CALM, lambda: 5000.0 + self.now_s, Green()), models=models
        )
        self.stored = {each.id: documents.encode(each) for each in stored}
        self.shadows: dict[str, bytes] = {}
        self.desired: bytes | None = None
        self.board = board
        self.sent: list[Published] = []
        self.done: dict[int, str] = {}
        self.writes: list[WriteDocument] = []
        self.answers: bool | None = True
        self.reads = True
        self.renews = True
        self.confirmed: list[int] = []

    def lead(self, seconds: int = 8) -> None:
        """Get the lease, and let the takeover end."""
        for _ in range(seconds):
            self.tick()

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass; renew the lease; answer reads and writes."""
        self.now_s += seconds
        pools = [
            lease(f"{pool}-{role}-0", role=role, pool=pool, version=version)
            for pool, version in VERSIONS.items()
            for role in ("router", "prefill", "decode")
        ]
        self.core.on_members([*pools, *map(lease, self.frontends)], self.now_s)
        answer = LeaseAnswer(OWN, self.core.leadership.term.number) if self.renews else None
        self.core.on_lease(answer, self.now_s, self.now_s)
        self.core.on_timer(self.now_s)
        self.perform()

    def perform(self) -> None:
        """Perform the actions of the core."""
        while actions := self.core.take_actions():
            for action in actions:
                match action:
                    case ReadStore():
                        read = StoreRead(
                            dict(self.stored), self.desired, self.board, 0, shadows=dict(self.shadows)
                        )
                        self.core.on_store(read if self.reads else None, self.now_s)
                    case Confirm():
                        self.confirmed.append(action.sequence)
                    case WriteDocument():
                        self.writes.append(action)
                        if self.answers:
                            is_shadow = action.kind is DocumentKind.SHADOW
                            (self.shadows if is_shadow else self.stored)[action.name] = action.data
                        self.core.on_written(action.number, self.answers, self.now_s)
                    case Send():
                        self.sent.append(action.snapshot)
                    case AppendEvent():
                        self.events.append(action)
                    case Done():
                        self.done[action.ticket] = action.error

    def hello(self, name: str, snapshot: Published | None, term: Term = NO_TERM) -> Receiver:
        """Let a frontend open its stream."""
        receiver = Receiver(name, "b", "frontend", "", highest_term=term)
        self.core.on_hello(receiver, snapshot, (), self.now_s)
        self.perform()
        return receiver

    def abort(self) -> None:
        """Let an operator abort the rollout, as ticket 1."""

        def make(now_s: float) -> Document:
            running = self.core.library.running
            assert running is not None
            request = commands.Command(pb.ChangeRolloutRequest.CHANGE_ABORT, "test")
            return commands.command(running, request, self.core.view(now_s), now_s).document

        self.core.command(Command(1, "rollout.abort", "r1", Author(), make, is_back=True), self.now_s)
        self.perform()


def test_a_document_that_is_too_large_never_stops_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the document the abort still takes the traffic back, and the core goes on."""
    driver = Driver(baking(1, 10))
    driver.lead()
    monkeypatch.setattr(documents, "DOCUMENT_BYTES_MAX", 10)
    driver.hello("frontend-0", None)
    driver.abort()
    assert driver.done == {1: ""} and driver.sent[-1].content.canary_percent == 0
    driver.tick()
    assert driver.core.library.running is not None


def test_an_unreadable_document_never_stops_a_rollback() -> None:
    """A later release wrote the document, so the write conflicts for ever: the abort counts in memory."""
    driver = Driver(baking(1, 10))
    driver.lead()
    driver.hello("frontend-0", None)
    driver.stored["r1"] = b'{"later": true}'
    driver.answers = False
    driver.tick()
    driver.abort()
    assert driver.done == {1: ""} and driver.sent[-1].content.canary_percent == 0


def test_a_receiver_that_repeats_its_refusals_fills_no_audit() -> None:
    """One entry for each snapshot of this leader, whatever names and reasons it makes up."""
    driver = Driver()
    driver.lead()
    receiver = driver.hello("frontend-0", None)
    published = driver.core.publisher.published
    assert published is not None
    foreign = [Name(Term(number, "x"), number) for number in range(1, 500)]
    for at, name in enumerate((*foreign, *[published.name] * 500)):
        driver.core.on_rejected(receiver, name, f"reason {at}", NO_TERM, driver.now_s)
        published = driver.core.publisher.published or published
    events = [each for each in driver.core.take_actions() if isinstance(each, AppendEvent)]
    assert len([each for each in events if each.what == "snapshot.rejected"]) <= 2


def test_a_content_that_is_too_large_still_takes_traffic_back() -> None:
    """With more cordons than a snapshot may hold, the part that takes traffic is published."""
    driver = Driver(baking(1, 10))
    driver.lead()
    driver.hello("frontend-0", None)
    many = tuple(CordonEntry(process_id=f"p{number}") for number in range(5000))
    driver.core.library.adopt(Desired(revision=1, cordons=many))
    driver.abort()
    assert driver.sent[-1].content.canary_percent == 0 and not driver.sent[-1].content.cordons


def test_one_stale_receiver_does_not_undo_a_promotion() -> None:
    """Documents are lost; the first hello is from a receiver behind. The promotion that others report stays."""
    promoted = changed(baking(3, 100), state_name="PROMOTING")
    stale = publish(Term(3, "control-9"), 1, content_of(baking(2, 50)))
    late = publish(Term(3, "control-9"), 2, content_of(promoted))
    driver = Driver()
    driver.tick()
    driver.hello("frontend-0", stale)
    driver.tick()
    driver.hello("frontend-1", late)
    driver.lead()
    assert driver.core.leadership.state is LeaderState.LEADER
    assert driver.core.content.stable.pool == "next"
    assert all(each.content.stable.pool == "next" for each in driver.sent)


def test_a_broken_receiver_does_not_use_up_the_terms() -> None:
    """A number far above all others is not believed."""
    driver = Driver()
    driver.lead()
    term = driver.core.leadership.term
    driver.hello("frontend-0", None, Term(term.number + 2 * JUMP_MAX, "zz"))
    assert driver.core.leadership.term == term
    driver.hello("frontend-1", None, Term(term.number + 5, "zz"))
    assert driver.core.leadership.term.number == term.number + 6


def test_a_refusal_of_a_snapshot_that_was_never_published_says_nothing() -> None:
    """Only refusals of this leader's snapshots take a rollout back."""
    driver = Driver(baking(1, 10))
    driver.lead()
    receiver = driver.hello("frontend-0", None)
    driver.core.on_rejected(receiver, Name(Term(1, "control-0"), 999), "made up", Term(0, ""), driver.now_s)
    assert driver.core.view(driver.now_s).nacks == ()
    published = driver.core.publisher.published
    assert published is not None
    driver.core.on_rejected(receiver, published.name, "no tokenizer", Term(0, ""), driver.now_s)
    assert [nack.reason for nack in driver.core.view(driver.now_s).nacks] == ["no tokenizer"]


def test_a_deposed_leader_sends_its_receivers_away() -> None:
    """With a lease in doubt, a higher term at a receiver ends the leadership; with a certain one it begins a new term."""
    driver = Driver()
    driver.lead()
    higher = Term(driver.core.leadership.term.number + 1, "control-1")
    driver.now_s += 10.0
    driver.hello("frontend-0", None, higher)
    assert not driver.core.leads


def test_a_router_of_an_unknown_pool_changes_no_snapshot() -> None:
    """Only configured pools are published, so a stray router is refused by no frontend."""
    driver = Driver()
    driver.lead()
    before: Content = driver.core.content
    stray = lease("scratch-router-0", role="router", pool="scratch", version="v9")
    driver.core.on_members([stray], driver.now_s)
    driver.tick()
    assert driver.core.content == before


@pytest.mark.parametrize(("version", "is_counted"), [("v2", True), ("v1", False), ("", True)])
def test_a_process_of_another_version_is_no_crash_loop(version: str, is_counted: bool) -> None:
    """It is in the canary's pool by mistake, and serves none of its requests."""
    driver = Driver(baking(1, 10))
    driver.hello("frontend-0", None)
    driver.lead()
    assert driver.core.library.running is not None
    for boot in "abc":
        stray = lease("next-decode-9", role="decode", pool="next", version=version)
        driver.core.on_members([*driver.core.registry.ordered(), changed(stray, boot_id=boot)], driver.now_s)
    driver.tick()
    assert any("crash_loop" in each.reason for each in driver.core.library.rollouts) == is_counted


def test_a_running_rollout_keeps_the_versions_of_its_start() -> None:
    """An operator gives a pool another version in the configuration, and restarts the control process."""
    for driver, is_complete in ((Driver(baking(1, 10)), True), (Driver(), False)):
        driver.core._versions["next"] = "v3"
        driver.lead()
        assert driver.core.view(driver.now_s).pool("next").is_complete == is_complete


def observations(sequence: int) -> pb_snapshot.ObservationBatch:
    """Return a batch with a session of its own."""
    end = pb_snapshot.RequestEnd(
        pool="next", rollout="r1", session=sequence, outcome="ok", ttft_s=0.05, prompt_tokens=9
    )
    return pb_snapshot.ObservationBatch(sequence=sequence, ends=[end])


def sessions(driver: Driver) -> int:
    """Return the canary's sessions that the judge has seen."""
    assert driver.core.judging is not None
    samples = driver.core.judging.verdict(5000.0 + driver.now_s).samples
    return {each.track: each.sessions for each in samples}["canary"]


def test_observations_of_a_takeover_are_judged_and_none_is_confirmed_before() -> None:
    """A frontend sends what was not confirmed as soon as it finds the new leader."""
    before = Judging(baking(1, 10), 4900.0)
    before.follow(baking(1, 10), 4900.0)
    for sequence in range(1, 7):
        before.observe(observations(sequence), "frontend-0/b", {"next": CANARY}, 4901.0)
    saved = before.save(4902.0)
    assert saved is not None
    board = publish(Term(1, "control-9"), 1, content_of(baking(1, 10)))
    driver = Driver(changed(baking(1, 10), judge=saved[0]), board=board)
    receiver = Receiver("frontend-0", "b", "frontend", "")
    driver.tick()
    assert driver.core.leadership.state is LeaderState.TAKING_OVER
    for sequence in (7, 8, 9):
        driver.core.on_observations(receiver, observations(sequence), driver.now_s)
    assert driver.core.judging is None
    driver.perform()
    assert not driver.confirmed
    driver.lead()
    driver.core.on_observations(receiver, observations(10), driver.now_s)
    assert sessions(driver) == 10
    driver.tick()
    gates = driver.core.view(driver.now_s).verdict.gates
    assert [each.result for each in gates if each.name == "observations"] == ["passes"]


def test_a_new_term_of_the_same_leader_keeps_its_judge() -> None:
    """Redis was away for a while: the streams stay open, so nobody sends observations again."""
    driver = Driver(baking(1, 10))
    driver.lead()
    receiver, term = driver.hello("frontend-0", None), driver.core.leadership.term
    driver.core.on_observations(receiver, observations(1), driver.now_s)
    judging = driver.core.judging
    driver.now_s += 6.0
    driver.core.on_observations(receiver, observations(2), driver.now_s)
    driver.tick()
    assert driver.core.leadership.term > term and driver.core.leadership.state is LeaderState.TAKING_OVER
    driver.core.on_observations(receiver, observations(3), driver.now_s)
    assert driver.core.judging is judging and sessions(driver) == 3


def test_a_leader_that_takes_over_from_itself_still_takes_traffic_back() -> None:
    """Redis answers one claim and no read: the takeover cannot end, and an abort is in force at once."""
    driver = Driver(baking(1, 10), board=publish(Term(1, "control-9"), 1, content_of(baking(1, 10))))
    driver.lead()
    driver.hello("frontend-0", None)
    assert driver.core.content.canary_percent > 0
    driver.now_s += 6.0
    driver.reads = False
    driver.tick()
    driver.answers = None
    assert driver.core.leadership.state is LeaderState.TAKING_OVER
    driver.abort()
    assert driver.done == {1: ""}
    assert driver.core.content.canary_percent == 0 and driver.sent[-1].content.canary_percent == 0


def test_a_step_back_waits_for_no_write_once_redis_has_failed() -> None:
    """The snapshot goes out and the command is done before Redis is asked again."""
    driver = Driver(baking(1, 10), board=publish(Term(1, "control-9"), 1, content_of(baking(1, 10))))
    driver.lead()
    driver.hello("frontend-0", None)
    driver.core.on_store(None, driver.now_s)
    running = driver.core.library.running
    assert running is not None and not driver.core.has_redis
    driver.core.take_actions()

    def make(now_s: float) -> Document:
        request = commands.Command(pb.ChangeRolloutRequest.CHANGE_ABORT, "test")
        return commands.command(running, request, driver.core.view(now_s), now_s).document

    driver.core.command(Command(1, "rollout.abort", "r1", Author(), make, is_back=True), driver.now_s)
    actions = driver.core.take_actions()
    assert [each.error for each in actions if isinstance(each, Done)] == [""]
    sent = [each.snapshot for each in actions if isinstance(each, Send)]
    assert sent and sent[-1].content.canary_percent == 0
    assert not any(isinstance(each, WriteDocument) for each in actions)


def test_a_command_that_waits_for_redis_holds_no_way_back_up() -> None:
    """A freeze waits for the end of the takeover; the abort behind it does not."""
    driver = Driver(baking(1, 10), board=publish(Term(1, "control-9"), 1, content_of(baking(1, 10))))
    driver.lead()
    driver.hello("frontend-0", None)
    driver.now_s += 6.0
    driver.reads = False
    driver.tick()
    driver.core.has_redis = True
    driver.core.command(Command(2, "freeze", "", Author(), lambda _: Desired(revision=1)), driver.now_s)
    driver.abort()
    assert driver.done == {1: ""}
    assert driver.core.content.canary_percent == 0


def test_a_command_about_regions_waits_until_the_leader_knows_what_is_written_down() -> None:
    """A drained region whose control plane is replaced is restored by the first command that reaches the new leader."""
    driver = Driver()
    driver.core.regions = RegionControl(RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: driver.now_s)
    drained = Declared(state=DeclaredState.DRAINED, revision=2, reason="upgrade", author="ann")
    orders = RegionOrders().with_declared("eu", drained)
    driver.desired = encode(Desired(revision=1).with_regions(orders))
    driver.reads = False
    driver.tick()
    assert driver.core.leads
    operators = RegionOperators(driver.core, driver.core.regions, lambda: driver.now_s)
    prepared = operators.restore(region_pb.RestoreRegionRequest(region="eu"), Author())
    driver.core.command(prepared.command(1, Author(), driver.core.library), driver.now_s)
    driver.perform()
    assert not driver.done
    driver.reads = True
    driver.lead()
    assert driver.done == {1: ""} and driver.core.library.desired.regions.declared["eu"].is_serving


def test_a_command_about_regions_decides_by_what_the_one_before_it_wrote() -> None:
    """A drain that waits behind a restore begins anew: it is forecast, and refused while the load is unknown."""
    driver = Driver()
    driver.core.regions = RegionControl(RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: driver.now_s)
    drained = Declared(state=DeclaredState.DRAINED, revision=2, reason="upgrade", author="ann")
    driver.desired = encode(Desired(revision=1).with_regions(RegionOrders().with_declared("eu", drained)))
    driver.lead()
    operators = RegionOperators(driver.core, driver.core.regions, lambda: driver.now_s)
    restore = operators.restore(region_pb.RestoreRegionRequest(region="eu"), Author())
    drain = operators.drain(region_pb.DrainRegionRequest(region="eu", reason="again"), Author())
    for ticket, prepared in enumerate((restore, drain), start=1):
        driver.core.command(prepared.command(ticket, Author(), driver.core.library), driver.now_s)
    driver.perform()
    assert driver.done == {1: "", 2: "the load of the region is not known yet; force overrides this"}
    assert driver.core.library.desired.regions.declared["eu"].is_serving


def test_a_region_is_drained_once_its_processes_say_that_they_are_idle() -> None:
    """A takeover ends with the hello of the last process. Its report comes later, and streams may run."""
    driver = Driver(frontends=("frontend-0",))
    driver.core.regions = RegionControl(RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: 5000.0)
    draining = Declared(state=DeclaredState.DRAINING, revision=2, reason="move", at_s=4900.0)
    driver.desired = encode(Desired(revision=1).with_regions(RegionOrders().with_declared("eu", draining)))
    driver.lead()
    members = [each for each in driver.core.registry.ordered() if each.role in ("frontend", "router")]
    receivers = [Receiver(each.process_id, each.boot_id, each.role, each.pool) for each in members]
    for receiver in receivers:
        driver.core.on_hello(receiver, None, (), driver.now_s)
        driver.tick(1.0)
    assert driver.core.leadership.state is LeaderState.LEADER

    def declared() -> DeclaredState:
        return driver.core.library.desired.regions.declared["eu"].state

    for receiver in receivers:
        assert declared() is DeclaredState.DRAINING
        driver.core.on_report(receiver, pb_snapshot.ReceiverReport(live_request_count=0), driver.now_s)
        driver.tick(1.0)
    driver.tick(1.0)
    assert declared() is DeclaredState.DRAINED


def test_the_facts_of_a_rollout_name_the_regions_that_are_not_heard() -> None:
    """A new leader has heard none of them yet. A mesh without regions has none."""
    driver = Driver()
    driver.lead()
    assert driver.core.view(driver.now_s).unheard == ()
    driver.core.regions = RegionControl(RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: driver.now_s)
    assert driver.core.view(driver.now_s).unheard == ("us",)


def test_a_drained_region_is_drained_again_whatever_its_load() -> None:
    """Its engines may be gone, so its load is unknown: the new reason is written down. A region that serves is refused."""
    driver = Driver()
    driver.core.regions = RegionControl(RegionNames("eu", {"eu": 0.5, "us": 0.5}), lambda: driver.now_s)
    drained = Declared(state=DeclaredState.DRAINED, revision=2, reason="rack move", author="ann", at_s=1.0)
    for state, error in ((None, "the load of the region is not known yet"), (drained, "")):
        orders = RegionOrders() if state is None else RegionOrders().with_declared("eu", state)
        driver.core.regions.take_orders(orders, driver.now_s)
        operators = RegionOperators(driver.core, driver.core.regions, lambda: driver.now_s)
        prepared = operators.drain(region_pb.DrainRegionRequest(region="eu", reason="longer"), Author("bob"))
        if error:
            with pytest.raises(CommandRefused, match=error):
                prepared.make(driver.now_s)
        else:
            desired, objections = prepared.make(driver.now_s)
            assert isinstance(desired, Desired) and not objections
            found = desired.regions.declared["eu"]
            assert (found.state, found.reason, found.author, found.at_s) == (
                DeclaredState.DRAINED,
                "longer",
                "bob",
                1.0,
            )


def test_a_command_whose_write_is_on_its_way_is_not_refused() -> None:
    """Redis may execute it, so its caller must look before it sends the command again."""
    driver = Driver(baking(1, 10))
    driver.lead()

    def make(_: float) -> Document:
        return Desired(revision=1)

    driver.core.command(Command(1, "freeze", "", Author(), make), driver.now_s)
    driver.core.command(Command(2, "freeze", "", Author(), make), driver.now_s)
    driver.core.release()
    done = {each.ticket: each.error for each in driver.core.take_actions() if isinstance(each, Done)}
    assert done == {1: UNKNOWN, 2: NOT_LEADER}


def test_an_undo_that_the_leader_hears_of_late_counts_for_all() -> None:
    """Redis and every document are lost. A receiver has the promotion, a later one the snapshot of its undo.

    All receivers apply what the leader then publishes, the second one too, and stable is stable again.
    """
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    first = publish(Term(5, "control-1"), 7, content_of(promoted))
    undone = transitions.taken_back(promoted, "undo", 1006.0)
    second = publish(
        Term(5, "control-1"), 8, wanted(content_of(promoted), Desired(), undone, VERSIONS, {"r1": ""})
    )
    driver, fences = Driver(), (Fence(), Fence(), Fence())
    fences[0].offer(first)
    fences[1].offer(second)
    driver.hello("frontend-0", first)
    driver.lead()
    assert driver.sent[-1].content.rollout_state.name == "PROMOTING"
    assert isinstance(fences[1].offer(driver.sent[-1]), Rejected)
    driver.hello("frontend-1", second)
    driver.tick()
    for fence in fences:
        assert fence.offer(driver.sent[-1]) == Applied(driver.sent[-1].name)
        assert fence.in_force is not None and fence.in_force.content.stable.pool == "stable"


def test_a_promotion_whose_document_is_lost_ends_once_every_frontend_applied_it() -> None:
    """Until then, and for a minute, a receiver may know of an undo. The pool stays stable, and the end is audited once."""
    promoted = publish(
        Term(5, "control-1"), 7, content_of(transitions.promoting(baking(3, 100), "passed", 1005.0))
    )
    driver = Driver(frontends=("frontend-0", "frontend-1"))
    one, other = (driver.hello(name, promoted) for name in ("frontend-0", "frontend-1"))
    driver.lead()
    named = driver.sent[-1]
    assert (named.content.rollout, named.content.rollout_state.name) == ("r1", "PROMOTING")
    driver.core.on_applied(one, named.name, driver.now_s)
    for _ in range(70):
        driver.core.on_report(one, pb_snapshot.ReceiverReport(), driver.now_s)
        driver.core.on_report(other, pb_snapshot.ReceiverReport(), driver.now_s)
        driver.tick()
        assert driver.sent[-1] == named
    driver.core.on_applied(other, named.name, driver.now_s)
    driver.tick()
    last = driver.sent[-1].content
    assert (last.rollout, last.stable.pool, last.stable.weight_percent) == ("", "next", 100)
    driver.tick(5.0)
    assert driver.sent[-1].content == last
    lost = [each for each in driver.events if each.what == "rollout.lost"]
    assert [each.target for each in lost] == ["r1"]


@pytest.mark.parametrize("is_over", [False, True])
def test_an_old_command_about_the_stable_pool_moves_no_promoted_traffic(is_over: bool) -> None:
    """Redis comes back with a dump from before the rollout that followed the command; receivers have its promotion."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    last = transitions.completed(promoted, "kept", 1007.0) if is_over else promoted
    command = Desired().with_stable("stable", "r0", 0)
    old = earlier(transitions.rolled_back(BACK, "empty", 1006.0))
    before = wanted(CALM, command, old, VERSIONS)
    content = wanted(wanted(before, command, promoted, VERSIONS), command, last, VERSIONS)
    driver = Driver(old)
    driver.core.library.adopt(command)
    driver.hello("frontend-0", publish(Term(5, "control-1"), 7, content))
    driver.lead()
    assert driver.sent and all(each.content.stable.pool == "next" for each in driver.sent)


def test_a_later_revision_of_a_document_is_reconciled() -> None:
    """Redis had an old dump, receivers the end of the rollout. A state folder then brings a later revision of BAKING."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    done = transitions.completed(promoted, "kept", 1007.0)
    content = wanted(content_of(promoted), Desired(), done, VERSIONS)
    driver = Driver(baking(3, 100), board=publish(Term(5, "control-1"), 7, content))
    driver.lead()
    driver.stored["r1"] = documents.encode(changed(baking(3, 100), revision=500))
    driver.hello("frontend-0", driver.core.publisher.published)
    for _ in range(3):
        driver.tick()
    known = driver.core.library.rollout("r1")
    assert known is not None and (known.state_name, known.revision > 500) == ("COMPLETED", True)
    assert all(each.content.stable.pool == "next" for each in driver.sent)


def test_a_rollout_that_waits_behind_a_revert_starts_from_its_stable_pool() -> None:
    """Both commands are queued at once. The second one is refused instead of undoing the first one."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    done = transitions.completed(promoted, "kept", 1007.0)
    board = publish(Term(5, "c"), 7, wanted(content_of(promoted), Desired(), done, VERSIONS))
    driver = Driver(done, board=board)
    driver.hello("frontend-0", board)
    driver.lead()
    core, author = driver.core, Author("operator")
    operators = Operators(core, lambda: 5000.0 + driver.now_s)
    past = publish(Term(4, "c"), 1, CALM)
    revert = operators.revert(pb.RevertSnapshotRequest(to=str(past.name), force=True), author, past)
    settings = pb.RolloutSettings(to_pool="stable")
    start = operators.start(pb.StartRolloutRequest(settings=settings, force=True), author, "r2")
    core.command(revert.command(1, author, core.library), driver.now_s)
    core.command(start.command(2, author, core.library), driver.now_s)
    driver.perform()
    driver.tick()
    assert driver.done[1] == "" and 'the stable pool has changed to "stable"' in driver.done[2]
    assert driver.sent[-1].content.stable.pool == "stable"


def test_a_lost_promotion_does_not_end_without_redis_or_before_a_frontend_is_heard() -> None:
    """Its end is a step forward. A frontend that is not heard yet may know of an undo."""
    promoted = transitions.promoting(baking(3, 100), "passed", 1005.0)
    for has_redis, late in ((False, ()), (True, ("frontend-1",))):
        driver = Driver(frontends=("frontend-0",))
        one = driver.hello("frontend-0", publish(Term(5, "control-1"), 7, content_of(promoted)))
        driver.lead()
        driver.core.on_applied(one, driver.sent[-1].name, driver.now_s)
        for second in range(70):
            driver.frontends = ("frontend-0", *(late if second > 40 else ()))
            driver.core.on_report(one, pb_snapshot.ReceiverReport(), driver.now_s)
            driver.reads = driver.renews = has_redis
            driver.tick()
        assert driver.sent[-1].content.rollout == "r1"
        assert not [each for each in driver.events if each.what == "rollout.lost"]


def lease(name: str, *, role: str = "frontend", pool: str = "", version: str = "v1") -> Member:
    """Return the lease of a process."""
    return Member(
        process_id=name,
        role=role,  # type: ignore[arg-type]  # one of the roles
        address=f"{name}:1",
        boot_id="b",
        model_version=version,
        block_tokens=16,
        pool=pool,
        capabilities=("pools",),
    )
