"""The watchdog of the server: it removes the shared-memory files of a killed server."""

import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from engines.contract.server_watchdog import http_address_of
from tests.patience import Patience

_MODEL = """
import mmap, os, sys
from engines.contract.server_watchdog import ServerWatchdog
with open(sys.argv[1], "r+b") as shared:
    region = mmap.mmap(shared.fileno(), 0)
watchdog = ServerWatchdog("127.0.0.1:1", int(sys.argv[2]) or os.getppid(), lambda: None)
print("watching", flush=True)
watchdog._run()
"""

_SERVER = """
import subprocess, sys
model = subprocess.Popen([sys.executable, "-c", *sys.argv[1:], "0"], stdout=subprocess.PIPE)
print(model.stdout.readline(), flush=True)
sys.stdin.read()
"""


def test_files_shared_with_a_killed_server_are_removed() -> None:
    """After kill -9 of the server the mapped file is removed, and its neighbour stays."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvmesh_test_") as folder:
        shared, other = Path(folder, "shared"), Path(folder, "other")
        for path in (shared, other):
            path.write_bytes(bytes(mmap.PAGESIZE))
        with subprocess.Popen(
            [sys.executable, "-c", _SERVER, _MODEL, str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        ) as server:
            assert server.stdout is not None
            assert b"watching" in server.stdout.readline()
            server.kill()
            server.wait()
            bound = Patience(10)
            while shared.exists() and not bound.is_over:
                time.sleep(0.02)
        assert not shared.exists()
        assert other.exists()


def test_a_model_whose_server_died_before_it_began_ends() -> None:
    """Its parent is another process then, which may live for ever."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvmesh_test_") as folder:
        shared = Path(folder, "shared")
        shared.write_bytes(bytes(mmap.PAGESIZE))
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        done = subprocess.run(
            [sys.executable, "-c", _MODEL, str(shared), str(gone.pid)],
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert not shared.exists()


_HUNG_MODEL = """
import ctypes, os, sys
from engines.contract.server_watchdog import ServerWatchdog
watchdog = ServerWatchdog("127.0.0.1:1", os.getppid(), lambda: None)
watchdog.start_reaper()
watchdog.start()
print("watching", os.getpid(), flush=True)
ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock, as a stub that waits for a dead server
"""


def test_a_model_that_hangs_ends_with_its_server() -> None:
    """It would keep the KV port for ever, and no thread of its own runs any more."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, _HUNG_MODEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as server:
        assert server.stdout is not None
        found = re.search(rb"watching (\d+)", server.stdout.readline())
        assert found is not None
        model = psutil.Process(int(found[1]))
        reaper = model.children(recursive=True)
        assert reaper and reaper[0].name() == "sh"
        server.kill()
        server.wait()
        psutil.wait_procs([model, *reaper], timeout=10)
        assert not any(each.is_running() for each in (model, *reaper))


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ((), "127.0.0.1:8000"),
        (("--http-port=9000",), "127.0.0.1:9000"),
        (("--http-port", "9000", "--http-address", "10.0.0.1"), "10.0.0.1:9000"),
        (("--http-address=0.0.0.0", "--http-port=1", "--http-port=2"), "127.0.0.1:2"),
        (("--allow-http=false", "--http-port=9000"), ""),
        (("--http-port=none",), ""),
    ],
)
def test_the_address_is_that_of_the_servers_command_line(options: tuple[str, ...], address: str) -> None:
    """A server that was started by hand tells it nowhere else. Another port's silence must not end the model."""
    code = "import signal; print(flush=True); signal.pause()"
    command = ("/opt/bin/tritonserver", "-c", code, *options)
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()  # a process has no command line until its new program runs
        try:
            assert http_address_of(server.pid) == address
        finally:
            server.kill()


def test_another_parent_has_no_address() -> None:
    """Nothing is polled then; the death of the parent still ends the model."""
    assert http_address_of(os.getpid()) == ""
    with subprocess.Popen((sys.executable, "-c", "")) as gone:
        gone.wait()
    assert http_address_of(gone.pid) == ""
