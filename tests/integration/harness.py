"""A whole mesh of real processes for tests: start it, kill a part, start it again, and see that nothing is left.

Each part is a child that dies with the test run. Engines are the reference engine in a real tritonserver.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from kvmesh import server
from kvmesh.child import bound_command
from kvmesh.cli.processes import processes_of
from kvmesh.config import MeshConfig, describe
from kvmesh.decode.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.ports import free_ports
from kvmesh.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 60.0


async def until(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool], timeout_s: float, what: str
) -> float:
    """Wait until `condition` holds and return the seconds it took. Raises AssertionError naming `what`."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        holds = condition()
        if isinstance(holds, Awaitable):
            holds = await holds
        if holds:
            return loop.time() - began_s
        assert loop.time() - began_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Part:
    """One process: how to start it, and it while it runs."""

    name: str
    command: Sequence[str]
    address: str
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process; does not wait until it is ready."""
        assert self.process is None, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                bound_command(self.command), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
            )

    async def end(self, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send `sig` and wait for the end. Return the exit status."""
        assert self.process is not None, f"{self.name} does not run"
        process, self.process = self.process, None
        process.send_signal(sig)
        return await asyncio.to_thread(process.wait, 30)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class Mesh:
    """Parts by name: redis, <replica>-engine, prefill-N, decode-N, router-N, frontend-N."""

    def __init__(self, config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> None:
        self.config = config
        self.folder = folder
        self.parts: dict[str, Part] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._engine_options = engine_options
        self._config_file = folder / "kvmesh.toml"
        self._config_file.write_text(describe(config))
        self._plan()

    def _plan(self) -> None:
        processes = processes_of(self.config, self._config_file, self.folder)
        taken = {int(word) for process in processes for word in process.command if word.isdecimal()}
        ports = (one for one in free_ports("127.0.0.1", 2 * len(processes) + len(taken)) if one not in taken)
        for process in processes:
            command = list(process.command)
            if process.role == "engine":
                command += self._engine_options
                address = f"127.0.0.1:{command[command.index('--grpc-port') + 1]}"
            elif process.role == "redis":
                address = f"127.0.0.1:{command[command.index('--port') + 1]}"
            else:
                # A part that is started again keeps its address.
                address = f"127.0.0.1:{next(ports)}"
                command[command.index("--listen") + 1] = address
            self.parts[process.name] = Part(
                process.name, command, address, self.folder / f"{process.name}.log"
            )

    async def start(self, *names: str) -> None:
        """Start the named parts, or all, and wait until each is ready and the routers see every replica."""
        wanted = [self.parts[name] for name in names] if names else list(self.parts.values())
        redis = [part for part in wanted if part.name == "redis"]
        engines = [part for part in wanted if part.name.endswith("-engine")]
        services = [part for part in wanted if part not in redis and part not in engines]
        for group in (redis + engines, services):
            for part in group:
                part.start()
            await asyncio.gather(*(self._ready(part) for part in group))
        if any(name.startswith("router") for name in names or self.parts):
            await self.placeable()

    async def placeable(self) -> None:
        """Wait until every router that runs may place on every replica that runs, and frontends serve."""
        replicas = {
            name
            for name, part in self.parts.items()
            if part.process and name.startswith(("prefill", "decode")) and not name.endswith("-engine")
        }
        for name, part in self.parts.items():
            if not part.process or not name.startswith("router"):
                continue

            async def sees_all(name: str = name) -> bool:
                status = await self.status(name)
                return {view.replica for view in status.replicas if view.placeable} == replicas

            await until(sees_all, 15, f"{name} sees {sorted(replicas)}")

    async def _ready(self, part: Part) -> None:
        def alive() -> bool:
            assert part.process is not None
            assert part.process.poll() is None, f"{part.name} ended while starting:\n{part.tail()}"
            return True

        async def ready() -> bool:
            alive()
            if part.name == "redis":
                host, _, number = part.address.rpartition(":")
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(number))
                    writer.close()
                    return True
                return False
            if part.name.endswith("-engine"):
                return await _engine_ready(part.address)
            return any(line.startswith('{"ready"') for line in part.log.read_text().splitlines()[-50:])

        if not part.name.endswith("-engine") and part.name != "redis":
            # An earlier start left its own ready line in the log.
            part.log.write_text("")
        try:
            await until(ready, START_S_MAX, f"{part.name} ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{part.tail()}") from None

    async def stop(self) -> None:
        """End everything."""
        for open_channel in self._channels.values():
            await open_channel.close(None)
        running = [part for part in reversed(self.parts.values()) if part.process is not None]
        for part in running:
            assert part.process is not None
            # SIGINT is what tritonserver takes as a clean stop; services drain on SIGTERM, which no test needs here.
            part.process.send_signal(signal.SIGINT if part.name.endswith("-engine") else signal.SIGKILL)
        for part in running:
            assert part.process is not None
            try:
                await asyncio.to_thread(part.process.wait, 10)
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()

    def channel(self, name: str) -> grpc.aio.Channel:
        """Return the channel to part `name`; closed by `stop`."""
        if name not in self._channels:
            self._channels[name] = server.channel(self.parts[name].address)
        return self._channels[name]

    def client(self, frontend: str = "frontend-0") -> Any:  # the stub's types are those of the sync API
        """Return a stub of a frontend."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel(frontend))

    async def status(self, name: str) -> Any:
        """Return the status of a router, prefill or decode."""
        channel = self.channel(name)
        if name.startswith("router"):
            return await router_pb2_grpc.RouterServiceStub(channel).GetStatus(router_pb2.GetStatusRequest())
        if name.startswith("prefill"):
            return await prefill_pb2_grpc.PrefillServiceStub(channel).GetStatus(
                prefill_pb2.GetStatusRequest()
            )
        return await decode_pb2_grpc.DecodeServiceStub(channel).GetStatus(decode_pb2.GetStatusRequest())

    def running(self, *roles: str) -> list[str]:
        """Return the names of the services of these roles that run."""
        return [
            name
            for name, part in self.parts.items()
            if part.process is not None and name.rpartition("-")[0] in roles
        ]

    async def held(self) -> dict[str, int]:
        """Return what the mesh holds for requests right now; all zero when it is idle."""
        held: dict[str, int] = {}
        for name in self.running("router"):
            router = await self.status(name)
            held[f"{name} queued"] = router.queued_request_count
            held[f"{name} relayed"] = router.relayed_request_count
            held[f"{name} orphans"] = router.orphan_count
            held[f"{name} overlay blocks"] = router.overlay_block_count
            held[f"{name} dispatched"] = sum(view.dispatched_request_count for view in router.replicas)
        for name in self.running("prefill", "decode"):
            status = await self.status(name)
            if name.startswith("prefill"):
                held[f"{name} slots"] = status.slot_count
            else:
                # Finished logs stay adoptable for the orphan time; they hold 4 bytes a token and nothing of the engine.
                held[f"{name} pending slots"] = status.pending_slot_count
                held[f"{name} orphans"] = status.orphan_count
            held[f"{name} engine calls"] = status.engine_call_count
            load = status.load_report
            held[f"{name} blocks in use"] = load.block_total_count - load.block_free_count
            held[f"{name} blocks reserved"] = load.block_reserved_count
            held[f"{name} running"] = load.running_request_count
            held[f"{name} queued"] = load.queued_request_count
            held[f"{name} handoffs"] = load.held_handoff_count
        return held

    async def tasks(self) -> dict[str, int]:
        """Return the asyncio tasks of each router, prefill and decode."""
        return {
            name: (await self.status(name)).task_count for name in self.running("router", "prefill", "decode")
        }

    async def idle(self, timeout_s: float) -> float:
        """Wait until the mesh holds nothing and return the seconds it took. Raises AssertionError with what is held."""
        last: dict[str, int] = {}

        async def nothing_held() -> bool:
            nonlocal last
            last = {name: count for name, count in (await self.held()).items() if count}
            return not last

        try:
            return await until(nothing_held, timeout_s, "mesh idle")
        except AssertionError:
            raise AssertionError(f"still held after {timeout_s:g} s: {json.dumps(last, indent=1)}") from None


async def _engine_ready(address: str) -> bool:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with suppress(grpc.RpcError):
            request = service_pb2.ModelReadyRequest(name="tensorrt_llm")
            return bool((await stub.ModelReady(request, timeout=2)).ready)
    return False


def engine_part(config: MeshConfig, folder: Path, *options: str) -> Part:
    """Return one decode-sized engine of `config`, on its own; not started."""
    alone = msgspec.structs.replace(config, prefill=msgspec.structs.replace(config.prefill, replicas=0))
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    engine = next(
        part
        for part in processes_of(alone, folder / "unused.toml", folder / "engine")
        if part.role == "engine"
    )
    command = [*engine.command, *options]
    address = f"127.0.0.1:{command[command.index('--grpc-port') + 1]}"
    return Part("engine", command, address, folder / "engine.log")


@asynccontextmanager
async def running_engine(config: MeshConfig, folder: Path, *options: str) -> AsyncIterator[str]:
    """Start one engine on its own, yield its address, and end it."""
    part = engine_part(config, folder, *options)
    part.start()
    try:
        await until(lambda: _engine_ready(part.address), START_S_MAX, "engine ready")
        yield part.address
    finally:
        await part.end(signal.SIGINT)


@asynccontextmanager
async def running_mesh(
    config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()
) -> AsyncIterator[Mesh]:
    """Start a mesh and end it, however the caller leaves."""
    mesh = Mesh(config, folder, engine_options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


def configure(**sections: dict[str, Any]) -> MeshConfig:
    """Return the default configuration with some keys of some sections replaced."""
    default = MeshConfig()
    return MeshConfig(
        **{name: msgspec.structs.replace(getattr(default, name), **keys) for name, keys in sections.items()}
    )
