"""The supervisor with tiny processes: start order, early death, processes that ignore signals, and no leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.cli import supervisor as supervisor_module
from kvmesh.cli.planned_process import Process
from kvmesh.cli.readiness import Addresses, ReadyLine
from kvmesh.cli.supervisor import STOP_S_MAX, Limits, ProcessFailed, ProcessState, Stopped, supervised
from kvmesh.server import DRAIN_S, STOP_GRACE_S
from tests.patience import patience

READY = """
import json, os, signal, sys
def note(text):
    with open(sys.argv[1], "a") as events: events.write(text + "\\n")
def say_ready():
    print(json.dumps({"ready": True, "role": "x", "id": "x", "address": "127.0.0.1:1", "metrics_address": ""}), flush=True)
def stop(*_):
    note("stop " + sys.argv[2]); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""
OBEDIENT = READY + "note('start ' + sys.argv[2]); say_ready(); signal.pause()"
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); say_ready()\nwhile True: signal.pause()"
BROKEN = READY + "sys.stderr.write('no such model\\n'); sys.exit(3)"
PARENT = READY + (
    "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
    "note(str(child.pid)); say_ready(); signal.pause()"
)


def fake(name: str, code: str, folder: Path, *deps: str) -> Process:
    """A process of this test; it writes its events to `folder`/events."""
    command = (sys.executable, "-S", "-c", code, str(folder / "events"), name)
    return Process(name, "fake", command, deps, ReadyLine())


def events(folder: Path) -> list[str]:
    return (folder / "events").read_text().split("\n")[:-1]


def wait_for_end(*pids: int) -> None:
    """Return when all `pids` are gone, zombies included. Raises TimeoutError after 10 s."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([handle], [], [], 10)[0]:
                raise TimeoutError(f"process {pid} lives on")
        finally:
            os.close(handle)


async def test_start_follows_dependencies_and_stop_reverses_them(tmp_path: Path) -> None:
    """A process starts when its dependencies are ready, and stops before they stop."""
    processes = [
        fake("service", OBEDIENT, tmp_path, "engine", "redis"),
        fake("engine", OBEDIENT, tmp_path, "redis"),
        fake("redis", OBEDIENT, tmp_path),
    ]
    seen: list[tuple[str, ProcessState]] = []
    async with supervised(
        processes, tmp_path / "logs", lambda member: seen.append((member.process.name, member.state))
    ) as supervisor:
        await supervisor.start()
        pids = [member.pid for member in supervisor.members.values()]
        assert {member.state for member in supervisor.members.values()} == {ProcessState.READY}
        addresses = supervisor.members["engine"].addresses
        assert addresses is not None
        assert addresses.address == "127.0.0.1:1"
    order = [f"start {name}" for name in ("redis", "engine", "service")]
    assert events(tmp_path) == order + [f"stop {name}" for name in ("service", "engine", "redis")]
    assert [state.value for name, state in seen if name == "redis"] == [
        "starting",
        "ready",
        "stopping",
        "ended",
    ]
    wait_for_end(*pids)


async def test_an_early_death_is_named_with_its_last_lines(tmp_path: Path) -> None:
    """The operator reads why the mesh did not start; all started processes are stopped."""
    processes = [
        fake("redis", OBEDIENT, tmp_path),
        fake("engine", BROKEN, tmp_path, "redis"),
        fake("service", OBEDIENT, tmp_path, "engine"),
    ]
    with pytest.raises(
        ProcessFailed, match=r"engine ended with status 3\. Last lines of its log:\n  no such model"
    ):
        async with supervised(processes, tmp_path / "logs") as supervisor:
            await supervisor.start()
    assert events(tmp_path) == ["start redis", "stop redis"]


@pytest.mark.parametrize(
    ("role", "deaths", "is_up"), [("engine", 2, True), ("engine", 3, False), ("fake", 1, False)]
)
async def test_an_engine_that_aborts_at_its_start_is_started_again(
    tmp_path: Path, role: str, deaths: int, is_up: bool
) -> None:
    """Triton may, on a busy machine. Three starts at most; another role has none but the first."""
    code = f"""
import os, sys
from pathlib import Path
count = Path(sys.argv[1] + ".count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
if number < {deaths}:
    print("aborts", number, flush=True)
    os.abort()
say_ready()
signal.pause()
"""
    engine = replace(fake("engine", READY + code, tmp_path), role=role)
    async with supervised([engine], tmp_path / "logs") as mesh:
        if is_up:
            await mesh.start()
            assert "aborts 1" in (tmp_path / "logs" / "engine.log").read_text()
        else:
            with pytest.raises(ProcessFailed, match="ended by SIGABRT"):
                await mesh.start()
        pid = mesh.members["engine"].pid
    wait_for_end(pid)


async def test_a_later_death_interrupts_the_work_and_stops_all(tmp_path: Path) -> None:
    """The death of one process stops the mesh: all others are stopped, and the reason is reported."""
    interrupted = asyncio.Event()

    async def work(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        try:
            await asyncio.Event().wait()
        finally:
            interrupted.set()

    processes = [fake("redis", OBEDIENT, tmp_path), fake("mortal", OBEDIENT, tmp_path, "redis")]
    with pytest.raises(ProcessFailed, match=r"mortal ended by SIGKILL\."):
        async with supervised(processes, tmp_path / "logs") as supervisor:
            await supervisor.start()
            await supervisor.run_while_alive(work(supervisor.members["mortal"].pid))
    assert interrupted.is_set()
    assert events(tmp_path)[-1] == "stop redis"


async def test_a_missing_binary_is_one_sentence(tmp_path: Path) -> None:
    """A command that does not exist is named, without a traceback."""
    missing = Process("engine", "fake", ("no-such-binary-here",), (), ReadyLine())
    with pytest.raises(ProcessFailed, match=r"Cannot start no-such-binary-here: No such file or directory\."):
        async with supervised([missing], tmp_path / "logs") as supervisor:
            await supervisor.start()


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A shutdown takes a bounded time in any case."""
    async with supervised(
        [fake("stubborn", STUBBORN, tmp_path)], tmp_path / "logs", limits=Limits(stop_s=0.2)
    ) as supervisor:
        await supervisor.start()
        member = supervisor.members["stubborn"]
    assert member.status == -signal.SIGKILL
    wait_for_end(member.pid)


def test_the_stop_limit_is_longer_than_a_drain() -> None:
    """A stream that is live at the first Ctrl-C is killed no sooner than its frontend ends its drain."""
    assert STOP_S_MAX > DRAIN_S + STOP_GRACE_S


async def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    """An operator may press Ctrl-C twice, and then nothing waits."""
    async with supervised(
        [fake("stubborn", STUBBORN, tmp_path)], tmp_path / "logs", limits=Limits(stop_s=600)
    ) as supervisor:
        await supervisor.start()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
        with pytest.raises(Stopped):
            await supervisor.run_while_alive(asyncio.Event().wait())
    assert supervisor.members["stubborn"].status == -signal.SIGKILL


async def test_grandchildren_end_with_their_process(tmp_path: Path) -> None:
    """The stub of a killed Triton server must end too."""
    async with supervised([fake("parent", PARENT, tmp_path)], tmp_path / "logs") as supervisor:
        await supervisor.start()
        grandchild = int(events(tmp_path)[0])
    wait_for_end(grandchild)


async def test_a_signal_during_the_start_stops_it(tmp_path: Path) -> None:
    """Ctrl-C also works before all processes are ready."""
    silent = Process(
        "silent", "fake", (sys.executable, "-c", "import signal; signal.pause()"), (), ReadyLine()
    )
    with pytest.raises(Stopped):
        async with supervised([silent], tmp_path / "logs") as supervisor:
            asyncio.get_running_loop().call_soon(supervisor.request_stop)
            await supervisor.start()


SUPERVISOR = textwrap.dedent(
    """
    import asyncio, json, sys
    from pathlib import Path
    from kvmesh.cli.planned_process import Process
    from kvmesh.cli.readiness import Addresses, ReadyLine
    from kvmesh.cli.supervisor import supervised
    folder, codes = Path(sys.argv[1]), json.loads(sys.argv[2])
    processes = [
        Process(str(n), "fake", (sys.executable, "-c", code, str(folder / "events"), str(n)), (), ReadyLine())
        for n, code in enumerate(codes)
    ]
    async def main():
        async with supervised(processes, folder / "logs") as supervisor:
            await supervisor.start()
            print(json.dumps([member.pid for member in supervisor.members.values()]), flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
    """
)


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """The kernel ends every process with the supervisor, also those that ignore signals."""
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), json.dumps([OBEDIENT, STUBBORN])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pids = json.loads(supervisor.stdout.readline())
        supervisor.kill()
    assert len(pids) == 2
    wait_for_end(*pids)


def test_a_child_whose_parent_died_first_does_not_start(tmp_path: Path) -> None:
    """The parent may die between fork and the registration at the kernel; the child detects this and ends."""
    from kvmesh import child

    command = [sys.executable, "-S", "-E", child.__file__, "1", "touch", str(tmp_path / "started")]
    assert subprocess.run(command, check=False, timeout=30).returncode == 125
    assert not (tmp_path / "started").exists()


LISTENER = READY.replace('"127.0.0.1:1"', "sys.argv[3]") + (
    "note('start ' + sys.argv[2] + ' ' + sys.argv[3]); say_ready(); signal.pause()"
)


def kept(folder: Path, code: str = LISTENER) -> Process:
    """A process with a listen address, as a service has one."""
    made = fake("kept", code, folder)
    return replace(made, command=(*made.command, "127.0.0.1:0"))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once `condition` holds. Raises TimeoutError."""
    async with patience(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_dead_process_is_started_again_at_its_address(tmp_path: Path) -> None:
    """Nothing else stops. Its new readiness counts, not the line of its first start."""
    told: list[tuple[str, ProcessState]] = []
    processes = [kept(tmp_path), fake("other", OBEDIENT, tmp_path, "kept")]
    async with supervised(
        processes,
        tmp_path / "logs",
        lambda member: told.append((member.process.name, member.state)),
        restarts=True,
    ) as supervisor:
        await supervisor.start()
        member = supervisor.members["kept"]
        member.addresses = Addresses("127.0.0.1:4711")
        for number in range(1, 3):
            pid = member.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: told.count(("kept", ProcessState.READY)) > number)  # noqa: B023  # awaited here
            assert member.pid != pid and member.died_s
        assert events(tmp_path)[-1] == "start kept 127.0.0.1:4711"
        assert supervisor.members["other"].state is ProcessState.READY
        assert ("other", ProcessState.STOPPING) not in told
    assert {member.state for member in supervisor.members.values()} == {ProcessState.ENDED}
    wait_for_end(*(member.pid for member in supervisor.members.values()))


def test_a_process_that_is_gone_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process id 0, of a process between two starts, is the group of the caller for the kernel."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    for pid in (0, 4711):
        supervisor_module._kill_group(pid)
    assert killed == [4711]


async def test_a_process_that_dies_again_and_again_fails_the_mesh(tmp_path: Path) -> None:
    """Five deaths in a minute are a crash loop. The text has the end of its log."""
    code = READY + (
        "import os\nif os.path.exists(sys.argv[1] + '.once'): sys.stderr.write('no such model\\n'); sys.exit(3)\n"
        "open(sys.argv[1] + '.once', 'w').close(); say_ready(); signal.pause()"
    )
    async with supervised([kept(tmp_path, code)], tmp_path / "logs", restarts=True) as supervisor:
        await supervisor.start()
        os.kill(supervisor.members["kept"].pid, signal.SIGKILL)
        with pytest.raises(
            ProcessFailed,
            match=r"kept ended 5 times within 60 s, the last time with status 3\.(.|\n)*no such model",
        ):
            await supervisor.run_while_alive(asyncio.Event().wait())
        assert supervisor.members["kept"].starts == 5


@pytest.mark.parametrize("turns", [0, 1, 5, 50])
async def test_a_stop_beside_a_restart_leaves_no_process(tmp_path: Path, turns: int) -> None:
    """However far the restart is."""
    async with supervised([kept(tmp_path)], tmp_path / "logs", restarts=True) as supervisor:
        await supervisor.start()
        member = supervisor.members["kept"]
        first = member.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: member.state is ProcessState.RESTARTING)
        for _ in range(turns):
            await asyncio.sleep(0.005)
    assert member.state is ProcessState.ENDED
    wait_for_end(first, *([member.pid] if member.pid else []))
