"""The receiver of a process: keeps the snapshot in force from the leader, the board in Redis and the state folder.

Whichever is newer wins (`fence`). The receiver puts its snapshot back on the board when Redis has lost it. Without a
leader, without Redis and without a disk, the snapshot in memory stays in force.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvmesh.clock import Clock
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.snapshot.board import Board, OnBoard, Refused
from kvmesh.snapshot.board_view import BoardView
from kvmesh.snapshot.content import NAME_BYTES_MAX, SnapshotError
from kvmesh.snapshot.control_processes import read_control_processes
from kvmesh.snapshot.fence import Applied, Fence, Rejected
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.leader_search import LeaderSearch
from kvmesh.snapshot.published import Published, name_message, read
from kvmesh.snapshot.state_file import StateFile
from kvmesh.snapshot.watch import Dial, Watch
from kvmesh.snapshot.watch_outbox import WatchOutbox
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
RETRY_PAUSE_S: Final = 0.25


def _report() -> pb.ReceiverReport:
    return pb.ReceiverReport()


def _no_observations() -> pb.ObservationBatch | None:
    return None


def _no_shadows() -> Sequence[shadow_pb2.ShadowReport]:
    return ()


def _ignore_life(drives_lives: bool, order: pb.LifeOrder | None) -> None:
    """Do nothing: only replicas have a life."""


class Receiver:
    """See the module. Call `start` once before the process serves. The task of `run` owns the receiver from then on.

    `on_change(published)` is called after each change of the snapshot in force, on the event loop. `dial`: see `Dial`.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        identity: Identity,
        fence: Fence,
        dial: Dial,
        *,
        state_dir: Path | None,
        on_change: Callable[[Published], None],
        clock: Clock,
        report: Callable[[], pb.ReceiverReport] = _report,
        observations: Callable[[], pb.ObservationBatch | None] = _no_observations,
        shadows: Callable[[], Sequence[shadow_pb2.ShadowReport]] = _no_shadows,
        on_confirmed: Callable[[int], None] = lambda _: None,
        on_leader: Callable[[], None] = lambda: None,
        on_life: Callable[[bool, pb.LifeOrder | None], None] = _ignore_life,
        on_regions: Callable[[pb.RegionTraffic], None] = lambda _: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Set up the receiver without I/O.

        `report`, `observations`, `shadows`: called once a second while a stream to a leader is up. `on_confirmed` gets the
        sequence number up to which the leader has stored observations. `on_leader`: a stream to a leader is new, so
        observations that were not confirmed have to be sent again. `on_life(drives lives, order)` is called for each
        message of a leader: whether the leader drives the lives of replicas, and the order in the message. `on_regions`
        gets each spill share and grant of a leader. `chance` returns a random number in [0, 1).
        """
        self.report = report
        self.observations = observations
        self.shadows = shadows
        self.rejected_total = 0
        self.restored_total = 0
        self._redis = redis
        self._mesh = mesh
        self._identity = identity
        self._fence = fence
        self._on_change = on_change
        self._on_confirmed = on_confirmed
        self._on_leader = on_leader
        self._on_life = on_life
        self._on_regions = on_regions
        self._drives_lives = False
        """True if the present leader drives the lives of replicas."""
        self._clock = clock
        self._board = BoardView(Board(redis, mesh))
        self._state = StateFile(state_dir)
        self._stale_state = asyncio.Event()
        """Set while the state folder is older than the fence."""
        self._kept: Published | None = None
        self._kept_ended: tuple[str, ...] = ()
        """The snapshot in the state folder, and the rollouts that it names as taken back."""
        self._search = LeaderSearch(chance)
        self._watch = Watch(self, self._search, dial, clock)
        self._heard_s = clock.now_s()

    @property
    def current(self) -> Published | None:
        """The snapshot that was applied whole. None: none was."""
        return self._fence.current

    @property
    def in_force(self) -> Published | None:
        """The snapshot in force, with all weight on its stable pool while `is_reduced`. None: none was ever received."""
        return self._fence.in_force

    @property
    def is_reduced(self) -> bool:
        """True while the process serves the stable pool alone, because it refused a snapshot (see Fence)."""
        return self._fence.is_reduced

    @property
    def is_connected(self) -> bool:
        """True while a stream to a leader is up."""
        return self._watch.is_connected

    @property
    def knows_control_process(self) -> bool:
        """True if a control process has a lease, as far as Redis answered, or a stream to a leader is up."""
        return self._watch.is_connected or bool(self._search.next_address())

    @property
    def awaits_first(self) -> bool:
        """True if no snapshot was ever received, and a control process is known that may send one."""
        return self._fence.in_force is None and bool(self._search.next_address())

    def report_now(self) -> None:
        """Report the state of the process to the leader at once, not with the next look at it."""
        self._watch.report_now()

    async def start(self) -> None:
        """Take the snapshot of the state folder and of the board. Without Redis the state folder alone counts."""
        found, ended = await asyncio.to_thread(lambda: (self._state.read(), self._state.read_ended()))
        self._fence.remember(ended)  # first: the snapshot may have a weight of one of them
        self._kept, self._kept_ended = found, ended
        if found is not None:
            self._offer(found)
        with suppress(RedisUnavailable):
            await self.poll()

    async def run(self) -> None:
        """Follow the board and the leader until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work, name in (
                (self._poll, "board"),
                (self._watch.run, "watch"),
                (self._keep_state, "state"),
            ):
                tasks.create_task(persist(work, f"snapshot-{name}", pause_s=RETRY_PAUSE_S))

    async def poll(self) -> None:
        """Read the board once, apply or restore it, and look for control processes. Raises RedisUnavailable."""
        found = await self._board.read()
        if isinstance(found, OnBoard):
            self._offer(found.snapshot)
        elif isinstance(found, Refused):
            self._on_rejected(Rejected(found.name, found.reason))
        current = self._fence.current
        # A snapshot whose rollout has been ended since must not come back: another process may not know of the end.
        if current is not None and not self.is_reduced and await self._board.restore(current):
            self.restored_total += 1
            log.warning(
                "the snapshot was missing in Redis and is restored", extra={"snapshot": str(current.name)}
            )
        if not self._watch.is_connected:
            processes = await read_control_processes(self._redis, self._mesh)
            self._search.take([process.address for process in processes])

    @property
    def state_failure_total(self) -> int:
        """Writes to the state folder that failed."""
        return self._state.failure_total

    def silence_s(self) -> float:
        """Return the time since the last message of a leader, or since the start without any."""
        return self._clock.now_s() - self._heard_s

    # WatchSink.

    @property
    def is_observed(self) -> bool:
        """See ReceiverState."""
        in_force = self._fence.in_force
        return in_force is not None and bool(in_force.content.running_rollout)

    def hello(self) -> pb.ReceiverHello:
        """See WatchSink."""
        return self._identity.hello(self._fence)

    def on_leader(self, address: str, now_s: float) -> None:
        """See WatchSink."""
        self._heard_s = now_s
        self._on_leader()

    def on_message(self, message: pb.WatchResponse, outbox: WatchOutbox, now_s: float) -> None:
        """See WatchSink."""
        self._heard_s = now_s
        if message.HasField("leader"):
            self._drives_lives = message.leader.drives_lives
        if message.HasField("snapshot"):
            self._on_published(message.snapshot, outbox)
        if message.confirmed_sequence:
            self._on_confirmed(message.confirmed_sequence)
        if message.HasField("regions"):
            self._on_regions(message.regions)
        self._on_life(self._drives_lives, message.life_order if message.HasField("life_order") else None)

    def _on_published(self, message: pb.Snapshot, outbox: WatchOutbox) -> None:
        try:
            snapshot = read(message.SerializeToString(deterministic=True))
        except SnapshotError as error:
            self._count_rejected(_shown(message.name), str(error))
            outbox.reject(_bounded(message.name), str(error), self._fence.highest_term)
            return
        answer = self._offer(snapshot)
        if isinstance(answer, Rejected):
            outbox.reject(name_message(answer.name), answer.reason, self._fence.highest_term)
            return
        current = self._fence.current
        if (
            current is not None
        ):  # also for a lower snapshot: the answer tells the sender which one is in force
            outbox.apply(name_message(current.name))

    # Decisions about one snapshot.

    def _offer(self, snapshot: Published) -> Applied | Rejected | None:
        before, in_force = self._fence.current, self._fence.in_force
        answer = self._fence.offer(snapshot)
        if isinstance(answer, Rejected):
            self._on_rejected(answer)
        elif answer is None and before is not None and snapshot.name.term < before.name.term:
            log.info(
                "a snapshot of a lower term is ignored",
                extra={"snapshot": str(snapshot.name), "in_force": str(before.name)},
            )
        elif answer is None and before is not None and snapshot.name.order == before.name.order:
            log.error("two snapshots have the name %s; the first one stays in force", before.name)
        now = self._fence.in_force
        if now is not None and now is not in_force:
            self._changed(now)
        if self._fence.ended_rollouts != self._kept_ended:
            self._stale_state.set()
        return answer

    def _changed(self, snapshot: Published) -> None:
        content = snapshot.content
        log.log(
            logging.WARNING if self.is_reduced else logging.INFO,
            "the stable pool alone is in force" if self.is_reduced else "snapshot in force",
            extra={
                "snapshot": str(snapshot.name),
                "rollout": content.rollout,
                "canary": content.canary_percent,
            },
        )
        self._stale_state.set()
        try:
            self._on_change(snapshot)
        except Exception:  # a bug in the process must not keep it from later snapshots
            log.exception("bug in the change to snapshot %s", snapshot.name)

    def _on_rejected(self, answer: Rejected) -> None:
        self._fence.highest_term = max(self._fence.highest_term, answer.name.term)
        self._count_rejected(str(answer.name), answer.reason)

    def _count_rejected(self, name: str, reason: str) -> None:
        self.rejected_total += 1
        log.warning("snapshot %s is refused: %s", name[:100], reason[:300])

    # Tasks.

    async def _poll(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def _keep_state(self) -> None:
        while True:
            await self._stale_state.wait()
            self._stale_state.clear()
            if self._state.is_there:
                await self._keep(self._fence.ended_rollouts, self._fence.current)

    async def _keep(self, ended: tuple[str, ...], current: Published | None) -> None:
        """Write what changed. The rollouts are first: a crash in between must not leave their weights alone."""
        if ended != self._kept_ended and await asyncio.to_thread(self._state.write_ended, ended):
            self._kept_ended = ended
        if current is None or current is self._kept:
            return
        if await asyncio.to_thread(self._state.write, current):
            self._kept = current


def _bounded(name: pb.SnapshotName) -> pb.SnapshotName:
    """Return `name` as an answer may repeat it: a longer one is left out."""
    is_long = len(name.term.leader.encode()) > NAME_BYTES_MAX or len(name.sha256) > NAME_BYTES_MAX
    return pb.SnapshotName() if is_long else name


def _shown(name: pb.SnapshotName) -> str:
    return f"{name.term.number}.{name.term.leader[:64]}/{name.version}"
