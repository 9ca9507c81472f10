"""A whole mesh of real processes for tests: start it, kill a part, restart it, and check that nothing is left.

Each part is a child process that dies with the test run. Engines are the reference engine in a real tritonserver.
Queries to a running mesh are in `live_mesh`; the same mesh in containers is in `containers`.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvmesh.child import bound_command
from kvmesh.cli.processes import processes_of
from kvmesh.cli.supervisor import STARTS_MAX
from kvmesh.config import MeshConfig, describe
from kvmesh.ports import free_ports
from tests.drawn_transports import drawn
from tests.integration.live_mesh import (
    ROOT,
    START_S_MAX,
    LiveMesh,
    accepts,
    configure,
    engine_ready,
    until,
)

__all__ = [
    "ROOT",
    "START_S_MAX",
    "Mesh",
    "Part",
    "configure",
    "engine_part",
    "engine_ready",
    "running_engine",
    "running_mesh",
    "until",
]


@dataclass
class Part:
    """One process: its command, and the process itself while it runs."""

    name: str
    command: Sequence[str]
    address: str
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    starts: int = field(default=0, repr=False)
    """Starts since the process was ready for the last time."""

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        assert self.process is None, f"{self.name} runs already"
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                bound_command(self.command), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
            )

    async def end(self, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send `sig` and wait for the end. Return the exit status."""
        assert self.process is not None, f"{self.name} does not run"
        process, self.process, self.starts = self.process, None, 0
        process.send_signal(sig)
        return await asyncio.to_thread(process.wait, 30)

    def start_again(self) -> bool:
        """Start an engine again that aborted before it was ready, as `kvmesh up` does. Return True if it runs."""
        if self.process is None or self.process.poll() is None:
            return self.process is not None
        has_aborted = self.name.endswith("engine") and self.process.returncode == -signal.SIGABRT
        if not has_aborted or self.starts >= STARTS_MAX:
            return False
        print(f"{self.name} aborted at its start, and is started again:\n{self.tail()}")
        self.process = None
        self.start()
        return True

    @property
    def is_running(self) -> bool:
        """True after `start`, until `stop`; the process may have ended by itself."""
        return self.process is not None

    @property
    def has_fallen(self) -> bool:
        """True if the process has ended without `stop`."""
        return self.process is not None and self.process.poll() is not None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    @property
    def http_address(self) -> str:
        """ "host:port" of its HTTP, in the last ready line. Empty: it offers none, or is not ready."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        ready = next((line for line in reversed(lines) if line.startswith('{"ready"')), "{}")
        return str(json.loads(ready).get("http_address", ""))

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def beside(command: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return the command of a process that runs beside the one of `command`, with other values of options.

    It takes any free port for its metrics, and a frontend for HTTP.
    """
    made = list(command)
    http = {"--http-port": "0"} if "--http-port" in made else {}
    for option, value in {"--metrics-port": "0", **http, **options}.items():
        made[made.index(option) + 1] = value
    return made


class Mesh(LiveMesh[Part]):
    """A mesh of processes on this machine."""

    def __init__(self, config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> None:
        """Plan the mesh, at an address of its own: beside another test's mesh, a port that was free may be taken at
        start.
        """
        config = msgspec.structs.replace(
            config, mesh=msgspec.structs.replace(config.mesh, host=own_loopback())
        )
        config = drawn(config)
        super().__init__(config)
        self.folder = folder
        self._engine_options = engine_options
        self._config_file = folder / "kvmesh.toml"
        self._config_file.write_text(describe(config))
        self._plan()

    def _plan(self) -> None:
        processes = processes_of(self.config, self._config_file, self.folder)
        taken = {int(word) for process in processes for word in process.command if word.isdecimal()}
        host = self.config.mesh.host
        ports = (one for one in free_ports(host, 2 * len(processes) + len(taken)) if one not in taken)
        for process in processes:
            command = list(process.command)
            if process.role == "engine":
                command += self._engine_options
                address = f"{host}:{command[command.index('--grpc-port') + 1]}"
            elif process.role == "redis":
                address = f"{host}:{command[command.index('--port') + 1]}"
            else:
                # A restarted part keeps its address.
                address = f"{host}:{next(ports)}"
                command[command.index("--listen") + 1] = address
            self.parts[process.name] = Part(
                process.name, command, address, self.folder / f"{process.name}.log"
            )

    def second(self, name: str) -> Part:
        """Return another process with the name of part `name`, at another address and with the same engine; not
        started.

        The caller ends the process: it is not a part of the mesh.
        """
        (port,) = free_ports(self.config.mesh.host, 1)
        address = f"{self.config.mesh.host}:{port}"
        command = beside(self.parts[name].command, {"--listen": address})
        return Part(f"{name}-second", command, address, self.folder / f"{name}-second.log")

    async def launch(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.start()

    async def ready(self, part: Part) -> None:
        async def is_ready() -> bool:
            assert part.process is not None
            assert part.start_again(), f"{part.name} ended while starting:\n{part.tail()}"
            if part.name == "redis":
                return await accepts(part.address)
            if part.name.endswith("-engine"):
                return await engine_ready(part.address)
            return any(line.startswith('{"ready"') for line in part.log.read_text().splitlines()[-50:])

        if not part.name.endswith("-engine") and part.name != "redis":
            # An earlier start left its ready line in the log.
            part.log.write_text("")
        try:
            await until(is_ready, START_S_MAX, f"{part.name} ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{part.tail()}") from None
        part.starts = 0

    async def stop(self) -> None:
        """End all processes."""
        await self.close_channels()
        running = [part for part in reversed(self.parts.values()) if part.process is not None]
        for part in running:
            assert part.process is not None
            # SIGINT stops tritonserver gracefully; services drain on SIGTERM, which no test needs here.
            part.process.send_signal(signal.SIGINT if part.name.endswith("-engine") else signal.SIGKILL)
        for part in running:
            assert part.process is not None
            try:
                await asyncio.to_thread(part.process.wait, 10)
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()


def own_loopback() -> str:
    """Return a loopback address that no other test listens on: all of 127.0.0.0/8 belongs to this machine."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


def engine_part(config: MeshConfig, folder: Path, *options: str) -> Part:
    """Return a stand-alone engine of `config`, sized for decode; not started."""
    alone = msgspec.structs.replace(
        config,
        prefill=msgspec.structs.replace(config.prefill, replicas=0),
        mesh=msgspec.structs.replace(config.mesh, host=own_loopback()),
    )
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    engine = next(
        part
        for part in processes_of(alone, folder / "unused.toml", folder / "engine")
        if part.role == "engine"
    )
    command = [*engine.command, *options]
    address = f"{alone.mesh.host}:{command[command.index('--grpc-port') + 1]}"
    return Part("engine", command, address, folder / "engine.log")


@asynccontextmanager
async def running_engine(config: MeshConfig, folder: Path, *options: str) -> AsyncIterator[str]:
    """Start a stand-alone engine, yield its address, and end it."""
    part = engine_part(config, folder, *options)
    part.start()

    async def is_ready() -> bool:
        assert part.start_again(), f"the engine ended while starting:\n{part.tail()}"
        return await engine_ready(part.address)

    try:
        await until(is_ready, START_S_MAX, "engine ready")
        yield part.address
    finally:
        await part.end(signal.SIGINT)


@asynccontextmanager
async def running_mesh(
    config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()
) -> AsyncIterator[Mesh]:
    """Start a mesh, and end it in any case."""
    mesh = Mesh(config, folder, engine_options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()
