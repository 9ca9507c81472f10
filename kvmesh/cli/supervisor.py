"""Supervisor of a list of processes: starts them in order of their dependencies. If one dies, all are stopped, or it is
started again.

Every process has its own session, so that Ctrl-C reaches the supervisor alone.
The kernel ends a process together with its supervisor (`kvmesh.child`), also
after `kill -9` of the supervisor. The event loop must run in the main thread:
the kernel watches the thread that forks.

States of a process: WAITING -> STARTING -> READY -> STOPPING -> ENDED. With restarts also READY -> RESTARTING -> READY.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from kvmesh.child import bound_command
from kvmesh.cli.planned_process import Process
from kvmesh.cli.readiness import Addresses
from kvmesh.cli.restarts import DEATHS_MAX, PERIOD_S, Restarts
from kvmesh.cli.shared_memory import clear
from kvmesh.server import DRAIN_S

START_S_MAX: Final = 60.0
"""Longest start of one process, from its command to its readiness."""

STOP_S_MAX: Final = DRAIN_S + 5.0
"""Time between SIGTERM and SIGKILL of one process, for its graceful shutdown: drain, then close."""

STARTS_MAX: Final = 3
"""Starts of an engine that dies by a signal before it is ready. On a busy machine tritonserver may abort while it starts a
Python model: `boost::interprocess::lock_exception` (triton-inference-server/server, issue 5949 and others).
"""

TAIL_LINES: Final = 12
"""Last lines of a log that the text of a failure has."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest times of each supervised process, and the length of a failure's text."""

    start_s: float = START_S_MAX
    """From its command to its readiness."""
    stop_s: float = STOP_S_MAX
    """Between SIGTERM and SIGKILL."""
    tail_lines: int = TAIL_LINES


_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Wait:
    """A process that was asked to stop and has not ended."""

    name: str
    since_s: float
    """Seconds since it was asked."""
    left_s: float
    """Seconds until it is killed."""


class ProcessState(Enum):
    """State of a supervised process."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died after it was ready, and is started again."""
    STOPPING = "stopping"
    ENDED = "ended"


class ProcessFailed(RuntimeError):
    """A process died or did not become ready. The text names the process and ends with the last lines of its log."""


class Stopped(Exception):
    """The supervisor was requested to stop."""


class Supervised:
    """One process under supervision. Owned by its Supervisor."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.state = ProcessState.WAITING
        self.addresses: Addresses | None = None
        self.is_ready = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.pid = 0
        self.starts = 0
        self.status: int | None = None
        self.restarts = Restarts()
        self.is_given_up = False
        """True once it died too often."""
        self.died_s = 0.0
        """Time of its last death."""
        self.stop_asked_s = 0.0
        """Time at which it was asked to stop."""
        self._log_from = 0
        """Size of the log at the last start."""

    @property
    def command(self) -> tuple[str, ...]:
        """Its command. A process that is started again listens at its old address, which clients know."""
        if self.addresses is None:
            return self.process.command
        host, _, _ = self.addresses.address.rpartition(":")
        return tuple(self.addresses.address if each == f"{host}:0" else each for each in self.process.command)

    def note_launch(self) -> None:
        """Note the begin of a start in the log."""
        self._log_from = self.log.stat().st_size if self.starts and self.log.exists() else 0

    def ready_line(self) -> dict[str, Any] | None:
        """Return the JSON line that says `"ready": true`, or None while it is not printed."""
        for line in self.log.read_bytes()[self._log_from :].splitlines(keepends=True):
            if line.startswith(b'{"ready": true') and line.endswith(b"\n"):
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def tail(self, count: int = TAIL_LINES) -> str:
        """Return the last `count` lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-count:]) or "  (its log is empty)"


class Supervisor:
    """Runs `processes`; build and use it inside `supervised`."""

    def __init__(
        self,
        processes: Sequence[Process],
        logs: Path,
        changed: Callable[[Supervised], None] = lambda _: None,
        limits: Limits = _LIMITS,
        *,
        restarts: bool = False,
    ) -> None:
        """Start nothing yet. `restarts`: a process that dies after it was ready is started again."""
        self._is_restarting = restarts
        self._limits = limits
        self.members = {
            process.name: Supervised(process, logs / f"{process.name}.log") for process in processes
        }
        self._changed = changed
        self._stop = asyncio.Event()
        self._must_kill = asyncio.Event()
        self._death: asyncio.Future[ProcessFailed] = asyncio.get_running_loop().create_future()
        self._watching: set[asyncio.Task[None]] = set()

    def request_stop(self) -> None:
        """Make `run_while_alive` raise Stopped; a second call kills the processes at once. Safe in a signal handler."""
        (self._must_kill if self._stop.is_set() else self._stop).set()

    async def start(self) -> None:
        """Start all processes; return when all are ready. Raises ProcessFailed or Stopped."""

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as tasks:
                for member in self.members.values():
                    tasks.create_task(self._start(member), name=f"start-{member.process.name}")

        try:
            await self.run_while_alive(all_of_them())
        except* ProcessFailed as failed:
            raise failed.exceptions[0] from None

    async def run_while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` while all processes live.

        Cancels `work` and raises ProcessFailed when a process dies, or Stopped on request.
        """
        doing = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((doing, stop, self._death), return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise self._death.result()
            if stop.done():
                raise Stopped
            return doing.result()
        finally:
            stop.cancel()
            doing.cancel()
            await asyncio.gather(doing, stop, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all processes, dependents first, each within `Limits.stop_s`; return when all have ended."""
        self._stop.set()
        dependents: dict[str, list[Supervised]] = {name: [] for name in self.members}
        for member in self.members.values():
            for name in member.process.deps:
                dependents[name].append(member)
        async with asyncio.TaskGroup() as tasks:
            for name, member in self.members.items():
                tasks.create_task(self._stop_one(member, dependents[name]), name=f"stop-{name}")
        ended = set[asyncio.Task[None]]()
        while more := self._watching - ended:  # a start that was under way adds one
            await asyncio.gather(*more)
            ended |= more

    def waits(self) -> list[Wait]:
        """Return the processes that a stop waits for now, in start order."""
        now_s = asyncio.get_running_loop().time()
        return [
            Wait(name, now_s - member.stop_asked_s, self._limits.stop_s - (now_s - member.stop_asked_s))
            for name, member in self.members.items()
            if member.state is ProcessState.STOPPING
        ]

    async def _start(self, member: Supervised) -> None:
        for name in member.process.deps:
            await self.members[name].is_ready.wait()
        self._move(member, ProcessState.STARTING)
        await self._launch(member)
        start_s = member.process.start_s or self._limits.start_s
        try:
            async with asyncio.timeout(start_s):
                member.addresses = await member.process.ready.wait(member)
        except TimeoutError:
            raise ProcessFailed(
                f"{member.process.name} was not ready after {start_s:g} s. {self._last_lines(member)}"
            ) from None
        member.is_ready.set()
        self._move(member, ProcessState.READY)

    async def _launch(self, member: Supervised) -> None:
        """Start the process and watch it. The log of an earlier start that failed stays."""
        # A file needs no reader, unlike a pipe. A grandchild that keeps the file open cannot hide a death.
        more = member.process.environment
        member.note_launch()
        with member.log.open("ab" if member.starts else "wb") as log:
            child = await asyncio.create_subprocess_exec(
                *bound_command(member.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **dict(more)} if more else None,
            )
        member.pid, member.starts = child.pid, member.starts + 1
        self._watching.add(
            asyncio.create_task(self._watch(member, child), name=f"watch-{member.process.name}")
        )

    async def _watch(self, member: Supervised, child: asyncio.subprocess.Process) -> None:
        """Wait for the child's end; then kill its process group and remove its shared memory."""
        member.status = await child.wait()
        _kill_group(member.pid)
        if member.process.shared_memory:
            clear(member.process.shared_memory)
        if self._may_start_again(member):
            await self._launch(member)
            return
        if self._may_restart(member) and await self._restart(member):
            return
        was_wanted = member.state is ProcessState.STOPPING
        self._move(member, ProcessState.ENDED)
        member.has_ended.set()
        if not was_wanted and not self._death.done():
            often = f" {DEATHS_MAX} times within {PERIOD_S:g} s, the last time" if member.is_given_up else ""
            told = f"{member.process.name} ended{often} {how(member.status)}. {self._last_lines(member)}"
            self._death.set_result(ProcessFailed(told))

    def _may_restart(self, member: Supervised) -> bool:
        """True if the process was ready before, and nothing has ended or stops the mesh."""
        was_ready = member.state in (ProcessState.READY, ProcessState.RESTARTING)
        return self._is_restarting and was_ready and not self._stop.is_set() and not self._death.done()

    async def _restart(self, member: Supervised) -> bool:
        """Start a dead process again after a pause. Return False if it died too often, or if the mesh stops meanwhile."""
        now_s = asyncio.get_running_loop().time()
        pause_s = member.restarts.pause_s(now_s)
        if pause_s is None:
            member.is_given_up = True
            return False
        if member.state is ProcessState.READY:
            member.died_s = now_s
        self._move(member, ProcessState.RESTARTING)
        member.pid = 0
        member.has_ended.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), pause_s)
        if self._stop.is_set() or self._death.done():
            return False
        member.has_ended.clear()
        await self._launch(member)
        if self._stop.is_set():
            _kill_group(member.pid)  # `stop` did not know it
        self._watching.add(
            asyncio.create_task(self._become_ready(member), name=f"ready-{member.process.name}")
        )
        return True

    async def _become_ready(self, member: Supervised) -> None:
        """Wait for the readiness of a process that was started again. One that is not ready in time is killed."""
        starts = member.starts
        waiting = asyncio.ensure_future(member.process.ready.wait(member))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            start_s = member.process.start_s or self._limits.start_s
            await asyncio.wait((waiting, stop), timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
            if starts != member.starts or self._stop.is_set():
                return
            if waiting.done():
                member.addresses = waiting.result()
                self._move(member, ProcessState.READY)
            elif member.pid:  # it did not die meanwhile
                _kill_group(member.pid)
        finally:
            stop.cancel()
            waiting.cancel()
            await asyncio.gather(waiting, stop, return_exceptions=True)

    def _last_lines(self, member: Supervised) -> str:
        return f"Last lines of its log:\n{member.tail(self._limits.tail_lines)}"

    def _may_start_again(self, member: Supervised) -> bool:
        """True if an engine died by a signal while it started, and nothing has ended or stops the mesh."""
        is_broken_start = member.state is ProcessState.STARTING and (member.status or 0) < 0
        is_over = self._stop.is_set() or self._death.done()
        return (
            member.process.role == "engine" and is_broken_start and member.starts < STARTS_MAX and not is_over
        )

    async def _stop_one(self, member: Supervised, dependents: Sequence[Supervised]) -> None:
        for dependent in dependents:
            if dependent.pid:
                await dependent.has_ended.wait()
        if not member.pid or member.has_ended.is_set():
            return
        member.stop_asked_s = asyncio.get_running_loop().time()
        self._move(member, ProcessState.STOPPING)
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL if self._must_kill.is_set() else signal.SIGTERM)
        ended = asyncio.ensure_future(member.has_ended.wait())
        must_kill = asyncio.ensure_future(self._must_kill.wait())
        await asyncio.wait(
            (ended, must_kill), timeout=self._limits.stop_s, return_when=asyncio.FIRST_COMPLETED
        )
        must_kill.cancel()
        if not ended.done():
            _kill_group(member.pid)
        await ended

    def _move(self, member: Supervised, state: ProcessState) -> None:
        member.state = state
        self._changed(member)


@asynccontextmanager
async def supervised(
    processes: Sequence[Process],
    logs: Path,
    changed: Callable[[Supervised], None] = lambda _: None,
    limits: Limits = _LIMITS,
    *,
    restarts: bool = False,
) -> AsyncIterator[Supervisor]:
    """Yield a Supervisor that handles SIGTERM, SIGINT and SIGHUP; all processes are stopped at the end of the block.

    Logs go to `logs/<name>.log`; each start overwrites them.
    """
    logs.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(processes, logs, changed, limits, restarts=restarts)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_stop)
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _kill_group(pid: int) -> None:
    """Kill all remaining processes of the session, for example the stub of a Triton server."""
    if not pid:
        return  # none is left; 0 would be this process's own group
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def how(status: int) -> str:
    """Return in words how a process ended, for example "by SIGKILL"."""
    if status < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-status).name}"
    return f"with status {status}"
