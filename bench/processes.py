"""The processes of one measurement: pinned to cores, controlled over stdin, stopped together."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from bench import accounting
from bench.results import BenchError
from kvmesh.child import bound_command
from kvmesh.ports import free_ports
from kvmesh.redis_binary import redis_binary, redis_command
from kvmesh.roles import service_command

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
TEST_CORE = 0
LOAD_CORE = 1
ANY_CORE = -1
ANY_PORT = "127.0.0.1:0"


class Process:
    """One child, its stdin and stdout. Stderr goes to a log file."""

    def __init__(self, name: str, command: Sequence[str], core: int, log: Path) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        with log.open("wb") as stderr, _pinned(core):
            self._child = subprocess.Popen(
                bound_command(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        self.pid = self._child.pid
        self.address = ""
        self.metrics_address = ""
        self.http_address = ""

    def ask(self, do: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises BenchError on an error, or without an answer in time."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} is gone: {self.log_tail()}") from None
        answer = self.read_answer(timeout_s)
        if "error" in answer:
            raise BenchError(f"{self.name} could not {do}: {answer['error']}")
        return answer

    def read_answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line of stdout that is a JSON object. Raises BenchError after `timeout_s`."""
        assert self._child.stdout is not None
        end_s = time.monotonic() + timeout_s
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        return answer
                continue
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0 or not select.select([self._child.stdout], [], [], remaining_s)[0]:
                raise BenchError(f"{self.name} did not answer within {timeout_s:g} s: {self.log_tail()}")
            chunk = self._child.stdout.read1(1 << 16)  # type: ignore[attr-defined]  # a BufferedReader
            if not chunk:
                raise BenchError(f"{self.name} ended: {self.log_tail()}")
            self._buffer += chunk

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the process has announced that it is ready, with its addresses. Raises BenchError."""
        ready = self.read_answer(timeout_s)
        self.address, self.metrics_address = ready["address"], ready.get("metrics_address", "")
        self.http_address = ready.get("http_address", "")

    def metric(self, name: str) -> float:
        """Return one series of a service's metrics. Raises BenchError if there is none of that name."""
        with urllib.request.urlopen(
            f"http://{self.metrics_address}/metrics", timeout=ANSWER_TIMEOUT_S
        ) as answer:
            for line in answer.read().decode().splitlines():
                series, _, value = line.rpartition(" ")
                if series == name:
                    return float(value)
        raise BenchError(f"{self.name} exports no {name}")

    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._child.poll() is None

    def log_tail(self, lines: int = 6) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            return " | ".join(text.splitlines()[-lines:]) or "nothing was logged"
        return "nothing was logged"

    def ask_to_stop(self) -> None:
        """Ask the process to end, without waiting."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        self._child.terminate()

    def wait_until(self, is_done: Callable[[], bool], problem: str, every_s: float = 0.1) -> None:
        """Return when `is_done`. Raises BenchError with `problem` after START_TIMEOUT_S, or if the process ends."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while not is_done():
            if not self.is_running() or time.monotonic() > end_s:
                problem = problem if self.is_running() else "ended"
                raise BenchError(f"{self.name} {problem}: {self.log_tail()}")
            time.sleep(every_s)

    def wait_for_port(self, port: int) -> None:
        """Return when the process accepts connections at `port` of loopback. Raises BenchError."""

        def is_listening() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        self.wait_until(is_listening, f"does not listen at port {port}", every_s=0.01)

    def close(self) -> None:
        """Ask the process to end, and wait for its end; kill it after STOP_TIMEOUT_S."""
        self.ask_to_stop()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


class Fleet:
    """All processes of one measurement. A context manager: leaving it stops them all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: list[Process] = []
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))
        self.redis_url = ""
        """URL of the Redis that `configure` started."""
        self.config_path = self.folder / "kvmesh.toml"
        """Configuration that `configure` writes."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*self._processes)
        self._stack.close()

    def stop(self, *processes: Process) -> None:
        """Stop `processes` together, the last one first, and return when all have ended."""
        for process in reversed(processes):
            process.ask_to_stop()
        for process in reversed(processes):
            process.close()
        self._processes = [process for process in self._processes if process not in processes]

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when all processes have stopped."""
        self._stack.callback(call)

    def process(self, name: str) -> Process:
        """Return the running process of that name. Raises BenchError if there is none."""
        for process in self._processes:
            if process.name == name:
                return process
        raise BenchError(
            f"no process {name!r} runs: there are {', '.join(one.name for one in self._processes)}"
        )

    def start(self, name: str, command: Sequence[str], core: int) -> Process:
        """Start a process. The fleet stops it."""
        process = Process(name, command, core, self.folder / f"{name}.log")
        self._processes.append(process)
        return process

    def module(self, name: str, module: str, core: int, /, **options: object) -> Process:
        """Start a Python module. `options`: its command-line options by name; underscores around a name are dropped."""
        words = [(f"--{name.strip('_').replace('_', '-')}", str(value)) for name, value in options.items()]
        return self.start(name, [sys.executable, "-m", module, *itertools.chain(*words)], core)

    def start_ready(self, name: str, module: str, core: int = LOAD_CORE, /, **options: object) -> Process:
        """Start a module of the bench and return when it is ready."""
        process = self.module(name, module, core, **options)
        process.wait_ready()
        return process

    def start_service(
        self, role: str, name: str, *options: str, core: int = ANY_CORE, listen: str = ANY_PORT
    ) -> Process:
        """Start a service of the mesh of `configure`, without waiting for it."""
        more = ("--redis", self.redis_url, *options)
        command = service_command(role, name, config=str(self.config_path), listen=listen, more=more)
        return self.start(name, command, core)

    def service(self, role: str, name: str, *options: str) -> Process:
        """Start a service of the mesh as the process under test and return when it is ready."""
        process = self.start_service(role, name, *options, core=TEST_CORE)
        process.wait_ready()
        return process

    def redis(self) -> str:
        """Start a Redis without persistence and return its URL."""
        port = free_port()
        process = self.start("redis", redis_command(redis_binary(), port, self.folder), LOAD_CORE)
        process.wait_for_port(port)
        return f"redis://127.0.0.1:{port}/0"

    def configure(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin a mesh: write its configuration from `tables`, with logs of warnings only, and start its Redis."""
        self.write_config(tables)
        self.redis_url = self.redis()

    def write_config(self, tables: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write the configuration of a mesh from `tables`, with logs of warnings only, and return its path."""
        lines = []
        for section, keys in {"telemetry": {"log_level": "warning"}, **tables}.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        self.config_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self.config_path


def prepare_kill(*processes: Process) -> Callable[[], None]:
    """Return a call that sends SIGKILL to `processes` and their present descendants, without delay."""
    family = [pid for process in processes for pid in (process.pid, *accounting.descendants(process.pid))]

    def kill() -> None:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return kill


def ask_all(processes: Sequence[Process], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Send a command to all at once and return their answers."""
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(lambda process: process.ask(do, **arguments), processes))


def free_port() -> int:
    """Return a free port outside of the range of outgoing connections."""
    return next(free_ports("127.0.0.1", 1))


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Pin this thread, and the processes that it starts, to `core` inside the block; ANY_CORE changes nothing."""
    before = os.sched_getaffinity(0)
    if core != ANY_CORE:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
