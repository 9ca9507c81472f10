"""Drives the core: its timer, its actions in their order, and the results back into it.

Three lanes. Messages to receivers go into their outboxes at once. A step back is sent when its document is written, or
at once if the last call of Redis failed. Claims of the leader's lease have a lane of their own, so a slow write never lets
the lease expire. Every other call of Redis follows in the order of the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

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
    Steer,
    WriteAid,
    WriteBoard,
    WriteDocument,
)
from controlplane.command_queue import Command
from controlplane.core import ControlCore
from controlplane.leadership import LeaseAnswer
from controlplane.rollouts.commands import CommandRefused
from controlplane.store.snapshot_history import PastSnapshot
from controlplane.store.store import Store
from controlplane.streams import ReceiverStreams
from controlplane.warmup.actions import CancelJob, Order, RunJob
from controlplane.warmup.jobs import Job, Result
from kvmesh.clock import Clock
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.control_processes import ControlProcess
from kvmesh.tasks import persist
from kvmesh.timer import Timer

log = logging.getLogger(__name__)

RENEW_S: Final = 1.0
"""Time between two renewals of the lease of the process."""

HEARTBEAT_S: Final = 1.9
"""Time between two heartbeats of a stream. A receiver expects one within two seconds, and waits for five.

All streams have them together: one wakeup for sixteen messages costs less than sixteen.
"""

COMMAND_S: Final = 8.0
"""Longest wait for the decision on a command. A caller waits ten seconds."""

GOLDEN_MAX: Final = 8
"""Golden runs at a time."""

PAUSE_S: Final = 0.25

RELEASE_S: Final = 1.0
"""Longest wait for Redis at a graceful shutdown."""

Golden = Callable[[RunGolden], Awaitable[None]]
RunWarmUp = Callable[[Job], Awaitable[Result]]


class ControlLoop:
    """See the module. The tasks of `background` own it. Call `touch` after each event of the core."""

    def __init__(
        self,
        core: ControlCore,
        store: Store,
        streams: ReceiverStreams,
        clock: Clock,
        process_id: str,
        golden: Golden | None = None,
        warm_up: RunWarmUp | None = None,
    ) -> None:
        """`warm_up` runs the jobs of warm-ups. None: no job ends."""
        self.core = core
        self.store = store
        self.streams = streams
        self.peers: list[ControlProcess] = []
        """The other control processes."""
        self._clock = clock
        self._process_id = process_id
        self._golden = golden
        self._golden_runs: set[asyncio.Task[None]] = set()
        self._golden_slots = asyncio.Semaphore(GOLDEN_MAX)
        self._warm_up = warm_up
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._leases = asyncio.Lock()
        """Held during each call that writes a lease."""
        self._is_released = False
        self._claim: ClaimLease | None = None
        self._claims = asyncio.Event()
        self._writes: deque[ReadStore | WriteDocument | WriteBoard | WriteAid] = deque()
        self._written = asyncio.Event()
        self._tickets = 0
        self._decisions: dict[int, asyncio.Future[str]] = {}
        self._led = False
        self._logged_twin = ""
        self._timer = Timer(self, clock, _log_bug)

    # The core's timer.

    def next_wake_s(self) -> float:
        """Return the time of the core's next timer."""
        return self.core.next_wake_s()

    def on_timer(self, now_s: float) -> None:
        """Run the core's timer, and its actions."""
        self.core.on_timer(now_s)
        self._perform()

    def touch(self) -> None:
        """Perform the actions of the core after an event, and set its timer."""
        self._perform()
        if not self._is_released:
            self._timer.update()

    # Tasks.

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the lanes, with their names."""
        yield "claims", persist(self._run_claims, "claims", pause_s=PAUSE_S)
        yield "writes", persist(self._run_writes, "writes", pause_s=PAUSE_S)
        yield "processes", persist(self._run_processes, "processes", pause_s=PAUSE_S)
        yield "heartbeats", persist(self._run_heartbeats, "heartbeats", pause_s=PAUSE_S)

    async def release(self) -> None:
        """Give the leadership back, at a graceful shutdown. Receivers are told at once."""
        self._is_released = True
        self._timer.close()
        self.core.release()
        self._perform()
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S), self._leases:  # no claim may follow the release
                await self.store.release()
                await self.store.flush()

    async def close(self) -> None:
        """Stop the timer, the golden runs and the jobs."""
        self._timer.close()
        running = [*self._golden_runs, *self._jobs.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # Commands.

    async def command(self, make: Callable[[int], Command]) -> None:
        """Run the command of `make(ticket)`, and return once it is in force. Raises CommandRefused and TimeoutError."""
        self._tickets += 1
        ticket = self._tickets
        decision = self._decisions[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.core.command(make(ticket), self._clock.now_s())
            self.touch()
            async with asyncio.timeout(COMMAND_S):
                error = await decision
        finally:
            del self._decisions[ticket]
        if error:
            raise CommandRefused(error)

    # Actions.

    def _perform(self) -> None:
        for action in self.core.take_actions():
            self._act(action)
        if self._led and not self.core.leads:
            self.streams.end_all(self.hint())
        self._led = self.core.leads

    def _act(self, action: Action) -> None:
        match action:
            case Send():
                self.streams.send(action)
            case Confirm():
                self.streams.confirm(action)
            case ClaimLease():
                self._claim = action
                self._claims.set()
            case ReadStore():
                if not any(isinstance(each, ReadStore) for each in self._writes):
                    self._queue(action)
            case WriteDocument() | WriteBoard() | WriteAid():
                self._queue(action)
            case Order():
                self.streams.order(action)
            case Steer():
                self.streams.steer(action)
            case RunJob():
                self._run_job(action)
            case CancelJob():
                job = self._jobs.get(action.number)
                if job is not None:
                    job.cancel()
            case AppendEvent():
                self.store.append(action)
                self._written.set()
            case Done():
                decision = self._decisions.get(action.ticket)
                if decision is not None and not decision.done():
                    decision.set_result(action.error)
            case RunGolden():
                self._run_golden(action)
            case ReleaseLease():
                pass  # `release` does it

    def hint(self) -> pb.LeaderHint:
        """Return which process leads, as far as this one knows."""
        holder = self.core.leadership.holder
        leads = self.core.leads
        address = (
            holder.address if holder is not None and (leads or holder.process_id != self._process_id) else ""
        )
        return pb.LeaderHint(
            process_id=self._process_id,
            is_leader=leads,
            leader_address=address,
            drives_lives=leads and self.core.warming.settings.drives_lives,
        )

    def _queue(self, action: ReadStore | WriteDocument | WriteBoard | WriteAid) -> None:
        self._writes.append(action)
        self._written.set()

    def _run_golden(self, action: RunGolden) -> None:
        if self._golden is None:
            return
        golden = self._golden

        async def run() -> None:
            async with self._golden_slots:
                await golden(action)
            self.touch()

        task = asyncio.create_task(run(), name=f"golden:{action.process_id}")
        self._golden_runs.add(task)
        task.add_done_callback(self._golden_runs.discard)

    def _run_job(self, action: RunJob) -> None:
        if self._warm_up is None:
            return
        warm_up = self._warm_up

        async def run() -> None:
            result = await warm_up(action.job)
            self.core.on_job(action.number, result, self._clock.now_s())
            self.touch()

        task = asyncio.create_task(run(), name=f"warm-up:{action.number}")
        self._jobs[action.number] = task
        task.add_done_callback(lambda done: self._end_job(action.number, done))

    def _end_job(self, number: int, task: asyncio.Task[None]) -> None:
        del self._jobs[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job of a warm-up failed", exc_info=error)

    # Lanes.

    async def _run_claims(self) -> None:
        self._timer.update()
        while True:
            await self._claims.wait()
            self._claims.clear()
            claim, self._claim = self._claim, None
            async with self._leases:
                if claim is None or self._is_released:
                    continue
                sent_s = self._clock.now_s()
                answer = await self.store.claim(claim.number)
            self._take_lease(answer, sent_s)

    def _take_lease(self, answer: LeaseAnswer | None, sent_s: float) -> None:
        if self._is_released:  # the lease goes back: the answer must not begin a term
            return
        self.core.on_lease(answer, sent_s, self._clock.now_s())
        self.touch()

    async def _run_writes(self) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            while self._writes:
                await self._perform_write(self._writes.popleft())
            if self.store.audit.waiting_count:
                await self.store.flush()

    async def _perform_write(self, action: ReadStore | WriteDocument | WriteBoard | WriteAid) -> None:
        """Call Redis. A bug there counts as no answer, so that the core never waits for a result that was lost."""
        try:
            await self._call(action)
        except Exception:
            log.exception("a call of the store failed")
            if isinstance(action, WriteDocument):
                self.core.on_written(action.number, None, self._clock.now_s())
                self.touch()

    async def _call(self, action: ReadStore | WriteDocument | WriteBoard | WriteAid) -> None:
        match action:
            case ReadStore():
                read = await self.store.read()
                self.core.on_store(read, self._clock.now_s())
            case WriteDocument():
                is_written = await self.store.write(action)
                self.core.on_written(action.number, is_written, self._clock.now_s())
            case WriteBoard():
                await self._write_board(action)
            case WriteAid():
                await self.store.write_aid(action)
        self.touch()

    async def _write_board(self, action: WriteBoard) -> None:
        past = next(
            (each for each in reversed(self.core.publisher.history) if each.snapshot == action.snapshot), None
        )
        is_written = await self.store.write_board(action.snapshot)
        if is_written is not False and past is not None:
            made = PastSnapshot(past.snapshot, past.reason, past.by)
            await self.store.record(made, is_later=is_written is None)

    async def _run_processes(self) -> None:
        while True:
            async with self._leases:
                peers = None if self._is_released else await self.store.renew()
            if peers is not None:
                self.peers = peers
                self._log_twin()
            await asyncio.sleep(RENEW_S)

    async def _run_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.streams.beat()

    def _log_twin(self) -> None:
        twin = next((each for each in self.peers if each.process_id == self._process_id), None)
        if twin is not None and twin.boot_id != self._logged_twin:
            self._logged_twin = twin.boot_id
            log.error(
                "another control process has the name %s (boot %s, at %s): give each a name of its own",
                twin.process_id,
                twin.boot_id,
                twin.address,
            )


def _log_bug(error: Exception) -> None:
    log.error("timer failed", exc_info=error)
