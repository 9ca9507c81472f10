"""A control plane on a virtual clock: real cores and fences, a Redis that forgets, links that break, processes that pause.

The schedule is a seed. Time is a heap of events. Every message takes some milliseconds, in order for each link.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from controlplane.actions import (
    AppendEvent,
    ClaimLease,
    Confirm,
    DocumentKind,
    Done,
    ReadStore,
    ReleaseLease,
    RunGolden,
    Send,
    WriteBoard,
    WriteDocument,
)
from controlplane.command_queue import Author, Command
from controlplane.core import ControlCore
from controlplane.judging import Judging
from controlplane.leadership import Holder, LeaseAnswer
from controlplane.library import Document
from controlplane.loop import HEARTBEAT_S
from controlplane.rollouts import commands
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import RolloutSettings
from controlplane.snapshots.receivers import Receiver
from controlplane.store.documents import DESIRED
from controlplane.store.documents import Document as StoredDocument
from kvmesh.control.v1 import control_pb2 as cpb
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.fence import Applied, Fence, Rejected
from kvmesh.snapshot.published import Published
from kvmesh.snapshot.watch import SILENCE_S
from kvmesh.snapshot.watch_outbox import WatchOutbox
from services.frontend.requests.observations import Observations
from tests.simulation.control.nodes import Control, Node, Peer
from tests.simulation.control.scripted_judge import GreenGolden, ScriptedJudge
from tests.simulation.control.simulated_redis import Copies, Redis

T = TypeVar("T")

VERSIONS = {"stable": "v1", "next": "v2", "stable-young": "v1"}
INITIAL = Content(
    (
        PoolTrack("next", "v2"),
        PoolTrack("stable", "v1", Track.STABLE, 100),
        PoolTrack("stable-young", "v1"),
    )
)
ANSWER_S = 0.5
"""Longest wait of a process for Redis."""


class World:
    """See the module. `checks` run after every event with the world."""

    def __init__(
        self, seed: int, *, controls: int = 2, frontends: int = 3, judge: type[Judging] = ScriptedJudge
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.now_s = 100.0
        self.judge = judge
        self.redis = Redis(lambda: self.now_s, self.check_leader_in_doubt)
        self.cut: set[frozenset[str]] = set()
        """Pairs that do not reach each other."""
        self.done: dict[int, str] = {}
        self.events: list[AppendEvent] = []
        self.commanded: dict[int, set[str]] = {}
        """Pools that operators made stable, by the number of the command."""
        self.applied: list[tuple[float, str, str, Published]] = []
        """(time, receiver, boot id, snapshot) of every application."""
        self.on_publish: Callable[[Control, Published], None] = lambda _, __: None
        """Called when a process writes the board."""
        self.tickets = itertools.count(1)
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals: dict[tuple[str, str], float] = {}
        self.controls = {f"control-{n}": Control(f"control-{n}") for n in range(controls)}
        self.peers: dict[str, Peer] = {f"frontend-{n}": Peer(f"frontend-{n}") for n in range(frontends)}
        for pool in VERSIONS:
            for role in ("router", "prefill", "decode"):
                name = f"{pool}-{role}-0"
                self.peers[name] = Peer(name, role=role, pool=pool)
        for control in self.controls.values():
            self.start_control(control)
        for peer in self.peers.values():
            self.start_peer(peer)

    # Time.

    def at(self, at_s: float, run: Callable[[], None]) -> None:
        """Run `run` at `at_s`."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._order), run))

    def after(self, delay_s: float, run: Callable[[], None]) -> None:
        """Run `run` after `delay_s`."""
        self.at(self.now_s + delay_s, run)

    def run_until(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run all events before `until_s`, or until `is_over`."""
        while self._heap and self._heap[0][0] <= until_s and not is_over():
            self.now_s, _, run = heapq.heappop(self._heap)
            run()
        if not is_over():
            self.now_s = max(self.now_s, until_s)

    def on(self, node: Node, boot: int, run: Callable[[], None]) -> None:
        """Run `run` at a node: later if it is paused, never if it restarted."""
        if not node.is_up or node.boot != boot:
            return
        if self.now_s < node.paused_until_s:
            self.at(node.paused_until_s, lambda: self.on(node, boot, run))
            return
        run()

    def send(self, source: Node, target: Node, run: Callable[[], None]) -> None:
        """Run `run` at `target` after a latency, in the order of the link; never across a cut."""
        boot, link = target.boot, (source.name, target.name)
        arrival_s = max(self._arrivals.get(link, 0.0), self.now_s + self.rng.uniform(0.001, 0.05))
        self._arrivals[link] = arrival_s

        def arrive() -> None:
            if frozenset(link) not in self.cut:
                self.on(target, boot, run)
            else:  # a stream loses no message and stays open
                for node in (source, target):
                    if isinstance(node, Peer):
                        node.dialed = ""

        self.at(arrival_s, arrive)

    # Control processes.

    def start_control(self, control: Control) -> None:
        """Start or restart a control process without memory."""
        control.boot += 1
        control.is_up, control.led, control.paused_until_s, control.is_leaving = True, False, 0.0, False
        control.copies = control.copies.restarted() if control.keeps_state else Copies()
        boot = control.boot

        def wall() -> float:
            return 1_700_000_000.0 + self.now_s + control.wall_offset_s

        control.core = ControlCore(
            control.name, control.boot_id, VERSIONS, INITIAL, wall, GreenGolden(), self.judge
        )
        self.on(control, boot, lambda: self._tick(control, boot))
        self.after(self.rng.uniform(0, 1), lambda: self._list(control, boot))
        self.after(HEARTBEAT_S, lambda: self.on(control, boot, lambda: self._beat(control, boot)))

    def _beat(self, control: Control, boot: int) -> None:
        for peer in self._receivers_of(control):
            self._down(control, peer, peer.stream, lambda: None)
        self.after(HEARTBEAT_S, lambda: self.on(control, boot, lambda: self._beat(control, boot)))

    def _receivers_of(self, control: Control) -> list[Peer]:
        known = {each.process_id: each for each in control.core.receivers if each.is_connected}
        return [
            peer
            for peer in self.peers.values()
            if peer.dialed == control.name and peer.name in known and known[peer.name].boot_id == peer.boot_id
        ]

    def crash(self, node: Node) -> None:
        """End a process without warning."""
        node.is_up = False
        node.boot += 1

    def terminate(self, control: Control) -> None:
        """SIGTERM: give the lease back, and end a second later."""
        boot, holder = control.boot, self._holder(control)

        def leave() -> None:
            control.is_leaving = True
            control.core.release()
            self.act(control)
            self._ask(control, lambda: self.redis.release(holder), lambda _: None)

        def end() -> None:
            if control.boot == boot and control.is_up:
                self.crash(control)

        self.on(control, boot, leave)
        self.after(1.0, end)

    def check_leader_in_doubt(self, holder: Holder) -> None:
        """The lease of `holder` goes to another process: it may not go forward any more, paused or not."""
        control = self.controls[holder.process_id]
        is_it = control.is_up and control.boot_id == holder.boot_id
        is_certain = is_it and control.core.leadership.may_go_forward(self.now_s)
        assert not is_certain, f"seed={self.seed}: {control.name} goes forward without its lease"

    def _holder(self, control: Control) -> Holder:
        return Holder(control.name, control.boot_id, f"{control.name}:1")

    def _tick(self, control: Control, boot: int) -> None:
        if control.is_leaving:
            return
        control.core.on_timer(self.now_s)
        self.act(control)
        pause_s = max(0.01, control.core.next_wake_s() - self.now_s)
        self.after(pause_s, lambda: self.on(control, boot, lambda: self._tick(control, boot)))

    def _list(self, control: Control, boot: int) -> None:
        def listed() -> None:
            if self.redis.is_up and control.has_redis:
                control.core.on_members(self.members(), self.now_s)
                self.act(control)

        self.on(control, boot, listed)
        if control.boot == boot:
            self.after(1.0, lambda: self._list(control, boot))

    def members(self) -> list[Member]:
        """Return the leases of all live receivers."""
        return [
            Member(
                process_id=peer.name,
                role=peer.role,  # type: ignore[arg-type]  # one of the roles
                address=f"{peer.name}:1",
                boot_id=peer.boot_id,
                model_version=VERSIONS.get(peer.pool, "v1"),
                block_tokens=16,
                pool=peer.pool,
                capabilities=("pools",),
            )
            for peer in self.peers.values()
            if peer.is_up
        ]

    def act(self, control: Control) -> None:
        """Execute the actions of a core. A process that led ends its streams."""
        if control.led and not control.core.leads:
            self._end_streams(control)
        control.led = control.core.leads
        for action in control.core.take_actions():
            match action:
                case ClaimLease():
                    self._claim(control, action)
                case ReadStore():
                    core, copies = control.core, control.copies
                    self._ask(
                        control,
                        lambda copies=copies: self.redis.read(copies),  # type: ignore[misc]
                        lambda answer, core=core: core.on_store(answer, self.now_s),  # type: ignore[misc]
                    )
                case WriteDocument():
                    self._write(control, action)
                case WriteBoard(snapshot):
                    control.copies.see(snapshot)
                    self.on_publish(control, snapshot)
                    self._ask(control, lambda s=snapshot: self.redis.offer(s), lambda _: None)  # type: ignore[misc]
                case Send():
                    self._deliver(control, action)
                case AppendEvent():
                    self.events.append(action)
                case Done(ticket, error):
                    self.done[ticket] = error
                case Confirm():
                    self._confirm(control, action)
                case ReleaseLease() | RunGolden():
                    pass

    def _confirm(self, control: Control, action: Confirm) -> None:
        peer = self.peers[action.process_id]
        if peer.boot_id == action.boot_id:
            self._down(control, peer, peer.stream, lambda: peer.told.confirm(action.sequence))

    def _end_streams(self, control: Control) -> None:
        holder = control.core.leadership.holder
        hint = holder.process_id if holder is not None and holder.process_id != control.name else ""
        for peer in self.peers.values():
            if peer.dialed == control.name:
                self._down(control, peer, peer.stream, lambda peer=peer: self._redirect(peer, hint))  # type: ignore[misc]

    def _claim(self, control: Control, action: ClaimLease) -> None:
        sent_s, core, holder = self.now_s, control.core, self._holder(control)

        def take(answer: LeaseAnswer | None) -> None:
            if not control.is_leaving:
                core.on_lease(answer, sent_s, self.now_s)

        self._ask(control, lambda: self.redis.claim(holder, action.number), take)

    def _write(self, control: Control, action: WriteDocument) -> None:
        core, copies = control.core, control.copies
        name = DESIRED if action.kind is DocumentKind.DESIRED else action.name
        document = StoredDocument(action.revision, action.data)

        def take(is_written: bool | None) -> None:
            if is_written:
                copies.documents.stored(name, document)
                copies.unstored.pop(name, None)
            elif is_written is None:
                copies.unstored[name] = document
            core.on_written(action.number, is_written, self.now_s)

        self._ask(control, lambda: self.redis.write(action), take)

    def _ask(self, control: Control, run: Callable[[], T], answer: Callable[[T | None], None]) -> None:
        """Ask Redis. The answer is None if Redis is not reached, or if only the answer is lost."""
        boot = control.boot

        def arrive() -> None:
            is_reached = self.redis.is_up and control.has_redis
            result = run() if is_reached else None
            is_lost = is_reached and self.rng.random() < 0.002
            delay_s = self.rng.uniform(0.001, 0.02) if is_reached and not is_lost else ANSWER_S
            value = None if is_lost else result

            def back() -> None:
                answer(value)
                self.act(control)

            self.after(delay_s, lambda: self.on(control, boot, back))

        self.after(self.rng.uniform(0.001, 0.02), arrive)

    def leader(self) -> Control | None:
        """Return a live process that may go forward."""
        for control in self.controls.values():
            if control.is_up and control.core.leadership.may_go_forward(self.now_s):
                return control
        return None

    def command(self, make: Callable[[ControlCore, float], Document], *, is_back: bool = False) -> int:
        """Give a command to the leader; return its ticket, 0 without a leader."""
        control = self.leader()
        if control is None:
            return 0
        ticket, core = next(self.tickets), control.core
        try:
            core.command(
                Command(ticket, "test", "", Author(), lambda now_s: make(core, now_s), is_back=is_back),
                self.now_s,
            )
        except commands.CommandRefused:
            return 0
        self.act(control)
        return ticket

    def start_rollout(self, name: str, settings: RolloutSettings) -> int:
        """Start a rollout at the leader."""

        def make(core: ControlCore, now_s: float) -> Document:
            stable = core.content.stable
            if stable.pool == settings.to_pool:
                raise commands.CommandRefused("the pool is stable already")
            return commands.start(
                name,
                settings,
                from_pool=stable.pool,
                from_version=stable.model_version,
                to_version=VERSIONS[settings.to_pool],
                by="test",
                view=core.view(now_s),
                now_s=core._wall(),
                is_forced=True,
            ).document

        return self.command(make)

    def change_rollout(self, what: str) -> int:
        """Pause, resume, abort or undo the running rollout."""
        change = cpb.ChangeRolloutRequest.Change.Value(f"CHANGE_{what.upper()}")

        def make(core: ControlCore, now_s: float) -> Document:
            running = core.library.running
            if running is None:
                raise commands.CommandRefused("no rollout runs")
            request = commands.Command(change, "test")
            return commands.command(running, request, core.view(now_s), core._wall()).document

        return self.command(make, is_back=what in ("abort", "undo"))

    def make_stable(self, pool: str) -> int:
        """Make a pool stable at the leader, as `snapshot revert` does."""

        def make(core: ControlCore, _: float) -> Document:
            if core.library.running is not None:
                raise commands.CommandRefused("a rollout runs")
            last, followed = core.library.rollout(""), core.content.stable_revision
            after = core.library.desired.with_stable(pool, last.id if last is not None else "", followed)
            self.commanded.setdefault(after.stable_revision, set()).add(pool)
            return after

        return self.command(make)

    def freeze(self, seconds: float) -> int:
        """Freeze the mesh at the leader; 0 ends the freeze."""

        def make(core: ControlCore, _: float) -> Document:
            desired = core.library.desired
            until_s = core._wall() + seconds if seconds else 0.0
            return replace(desired, revision=desired.revision + 1, frozen_until_s=until_s)

        return self.command(make)

    # Receivers.

    def start_peer(self, peer: Peer) -> None:
        """Start or restart a receiver. Without a state folder it has forgotten everything."""
        peer.boot += 1
        peer.is_up, peer.paused_until_s, peer.dialed = True, 0.0, ""
        peer.told = Observations(peer.boot_id)
        if peer.traffic is not None:
            peer.traffic.restart()
        before, peer.fence, peer.refuses = peer.fence, Fence(peer.refusal), False
        if peer.keeps_state:
            peer.fence.remember(before.ended_rollouts)
            if before.current is not None:
                self.offer(peer, before.current)
        boot = peer.boot
        self.after(self.rng.uniform(0, 0.5), lambda: self.on(peer, boot, lambda: self._poll(peer, boot)))

    def _poll(self, peer: Peer, boot: int) -> None:
        """Once a second: read the board, put a lost one back, dial, report what the outbox wants to."""
        if self.redis.is_up and peer.has_redis:
            board = self.redis.board
            if board is not None:
                self.offer(peer, board)
            current = peer.fence.current
            if current is not None and (board is None or board.name.order < current.name.order):
                self.redis.offer(current)
        if not peer.dialed or self.now_s - peer.heard_s > SILENCE_S:
            self._dial(peer)
        else:
            peer.now_s = self.now_s
            message = peer.outbox.take(self.now_s, peer)
            if message is not None:
                self._up(peer, peer.stream, lambda core, r: core.on_report(r, message.report, self.now_s))
            if message is not None and message.HasField("observations"):
                self._up(peer, peer.stream, lambda core, r: self._observe(core, r, message.observations))
        self.after(1.0, lambda: self.on(peer, boot, lambda: self._poll(peer, boot)))

    def _observe(self, core: ControlCore, receiver: Receiver, batch: pb.ObservationBatch) -> None:
        """Take a batch. A judge misses one only if Redis lost what it had stored."""
        core.on_observations(receiver, batch, self.now_s)
        judging = core.judging
        lost = judging.lost_batches(core._wall()) if isinstance(judging, ScriptedJudge) else 0
        assert not lost or self.redis.has_lost, (
            f"seed={self.seed}: {lost} batches are lost at {self.now_s:.1f} s"
        )

    def _dial(self, peer: Peer) -> None:
        live = [name for name, control in self.controls.items() if control.is_up]
        if not live:
            peer.dialed = ""
            return
        name = peer.hint if peer.hint in live else self.rng.choice(live)
        peer.hint = ""
        peer.dialed, peer.heard_s = name, self.now_s
        peer.outbox = WatchOutbox(pb.ReceiverHello())
        peer.outbox.take(self.now_s, peer)  # the introduction, which goes as `hello` below
        peer.outbox.is_leader = True
        peer.stream += 1
        peer.told.resend()
        control, stream, boot_id = self.controls[name], peer.stream, peer.boot_id
        receiver = Receiver(
            peer.name,
            boot_id,
            peer.role,
            peer.pool,
            frozenset({"pools"}),
            frozenset(VERSIONS.values()),
            highest_term=peer.fence.highest_term,
        )
        current, ended = peer.fence.current, peer.fence.ended_rollouts

        def hello() -> None:
            core = control.core
            if core.leads:
                core.on_hello(receiver, current, ended, self.now_s)
                self.act(control)
                self._down(control, peer, stream, lambda: None)
            else:
                holder = core.leadership.holder
                hint = holder.process_id if holder is not None else ""
                self._down(control, peer, stream, lambda: self._redirect(peer, hint))

        self.send(peer, control, hello)

    def _redirect(self, peer: Peer, hint: str) -> None:
        peer.hint, peer.dialed = hint, ""

    def _up(self, peer: Peer, stream: int, run: Callable[[ControlCore, Receiver], None]) -> None:
        """Send a message to the dialed process."""
        if peer.stream != stream or not peer.dialed:
            return
        control, boot_id = self.controls[peer.dialed], peer.boot_id

        def arrive() -> None:
            receiver = control.core.receivers.get(peer.name, boot_id)
            if control.core.leads and receiver is not None and receiver.is_connected:
                run(control.core, receiver)
                self.act(control)
            else:
                self._down(control, peer, stream, lambda: self._redirect(peer, ""))

        self.send(peer, control, arrive)

    def _down(self, control: Control, peer: Peer, stream: int, run: Callable[[], None]) -> None:
        """Send a message to a receiver on its stream; every message counts as a heartbeat."""

        def arrive() -> None:
            if peer.stream == stream and peer.dialed == control.name:
                peer.heard_s = self.now_s
                run()

        self.send(control, peer, arrive)

    def _deliver(self, control: Control, action: Send) -> None:
        peer = self.peers[action.process_id]
        if peer.boot_id != action.boot_id:
            return
        stream, snapshot = peer.stream, action.snapshot

        def take() -> None:
            result = self.offer(peer, snapshot)
            name, highest = snapshot.name, peer.fence.highest_term
            if isinstance(result, Rejected):
                reason = result.reason
                self._up(peer, stream, lambda core, r: core.on_rejected(r, name, reason, highest, self.now_s))
            elif peer.fence.current is not None:  # the one in force, also if the delivered one is lower
                in_force = peer.fence.current.name
                self._up(peer, stream, lambda core, r: core.on_applied(r, in_force, self.now_s))

        self._down(control, peer, stream, take)

    def offer(self, peer: Peer, snapshot: Published) -> Applied | Rejected | None:
        """Offer a snapshot to a receiver's fence, with the checks of safety around it."""
        before, ended = peer.fence.current, set(peer.fence.ended_rollouts)
        result = peer.fence.offer(snapshot)
        current = peer.fence.current
        if current is not before:
            assert current is not None
            self.applied.append((self.now_s, peer.name, peer.boot_id, current))
            assert before is None or current.name.order > before.name.order, f"seed={self.seed}: went back"
            content = current.content
            is_condemned = content.rollout in ended and content.canary_percent
            assert not is_condemned, f"seed={self.seed}: {peer.name} raised a condemned canary"
        return result

    # What the checkers read.

    def documents_of(self, name: str) -> list[RolloutDocument]:
        """Return every written revision of a rollout."""
        return [each for each in self.redis.written if each.id == name]

    def final(self, name: str) -> RolloutDocument | None:
        """Return the document of a rollout as the leader knows it, if it is over."""
        control = self.leader()
        found = control.core.library.rollout(name) if control is not None else None
        return found if found is not None and found.is_final else None
