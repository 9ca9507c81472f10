"""Queries to a running mesh, with processes of this machine or with containers."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
import msgspec

from kvmesh import server
from kvmesh.config import MeshConfig
from kvmesh.decode.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.pools import DEFAULT_POOL
from kvmesh.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from kvmesh.roles import ROLES
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.patience import Patience

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 60.0
STATUS_S_MAX = 10.0
"""Timeout of a query: a part that does not answer for this long fails the test; it may be cut off or frozen."""


class LivePart(Protocol):
    """One part of a mesh: a process with an address that can be ended and restarted."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """ "host:port" of its gRPC (Redis: of its protocol); stable for the part's life."""
        ...

    @property
    def http_address(self) -> str:
        """ "host:port" of a frontend's HTTP. Empty: it offers none."""
        ...

    @property
    def is_running(self) -> bool: ...

    def start(self) -> None:
        """Start the part, without waiting until it is ready."""
        ...

    async def end(self, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send `sig` and wait for the end. Return the exit status."""
        ...

    def tail(self) -> str:
        """Return the last lines of its log."""
        ...


PartT = TypeVar("PartT", bound=LivePart)


class LiveMesh(ABC, Generic[PartT]):
    """Parts by name: redis, <replica>-engine, prefill-N, decode-N, router-N, frontend-N. Those of a pool with a name begin
    with that name.

    `placeable_s_max`: longest wait until routers may place on all replicas.

    A subclass fills `parts` in its constructor, and implements start, readiness and end.
    """

    placeable_s_max = (
        60.0  # a control plane holds fresh replicas back for some seconds, more on a busy machine
    )

    def __init__(
        self, config: MeshConfig, connect: Callable[[str], grpc.aio.Channel] = server.channel
    ) -> None:
        """Set up the mesh. `connect` opens the channel to a service at "host:port"."""
        self.config = config
        self.parts: dict[str, PartT] = {}
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def start(self, *names: str) -> None:
        """Start the named parts, or all, and wait until each is ready and all routers see all replicas."""
        wanted = [self.parts[name] for name in names] if names else list(self.parts.values())
        first = [part for part in wanted if part.name == "redis" or part.name.endswith("-engine")]
        services = [part for part in wanted if part not in first]
        for group in (first, services):
            await self.launch(group)
            await asyncio.gather(*(self.ready(part) for part in group))
        if any(role_of(name) == "router" for name in names or self.parts):
            await self.placeable()

    @abstractmethod
    async def launch(self, parts: Sequence[PartT]) -> None:
        """Start `parts` at once, without waiting until they are ready."""

    @abstractmethod
    async def ready(self, part: PartT) -> None:
        """Wait until `part` serves. Raises AssertionError with its log if it ends or the time runs out."""

    @abstractmethod
    async def stop(self) -> None:
        """End all parts."""

    async def placeable(self) -> None:
        """Wait until every running router may place on every running replica of its pool, and all frontends serve."""
        for name in self.running("router"):
            replicas = {each for each in self.running("prefill", "decode") if pool_of(each) == pool_of(name)}

            async def sees_all(name: str = name, replicas: set[str] = replicas) -> bool:
                status = await self.status(name)
                return {view.replica for view in status.replicas if view.placeable} == replicas

            try:
                await until(sees_all, self.placeable_s_max, f"{name} sees {sorted(replicas)}")
            except AssertionError as error:
                seen = await self.status(name)
                raise AssertionError(f"{error}, but:\n{seen}\n{self.parts[name].tail()}") from None

    def channel(self, name: str) -> grpc.aio.Channel:
        """Return the channel to part `name`; `stop` closes it."""
        if name not in self._channels:
            self._channels[name] = self._connect(self.parts[name].address)
        return self._channels[name]

    async def close_channels(self) -> None:
        """Close all channels; the next call opens new ones."""
        while self._channels:
            await self._channels.popitem()[1].close(None)

    def client(self, frontend: str = "frontend-0") -> Any:  # the stub's types are those of the sync API
        """Return a stub of a frontend."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel(frontend))

    async def status(self, name: str) -> Any:
        """Return the status of a router, prefill or decode."""
        channel = self.channel(name)
        if role_of(name) == "router":
            router = router_pb2_grpc.RouterServiceStub(channel)
            return await router.GetStatus(router_pb2.GetStatusRequest(), timeout=STATUS_S_MAX)
        if role_of(name) == "prefill":
            prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
            return await prefill.GetStatus(prefill_pb2.GetStatusRequest(), timeout=STATUS_S_MAX)
        decode = decode_pb2_grpc.DecodeServiceStub(channel)
        return await decode.GetStatus(decode_pb2.GetStatusRequest(), timeout=STATUS_S_MAX)

    def running(self, *roles: str) -> list[str]:
        """Return the names of the running services of these roles."""
        return [name for name, part in self.parts.items() if part.is_running and role_of(name) in roles]

    async def held(self) -> dict[str, int]:
        """Return the resources that the mesh holds for requests now; all zero in an idle mesh."""
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
            if role_of(name) == "prefill":
                held[f"{name} slots"] = status.slot_count
            else:
                # Finished logs can be taken over for some time (detached streams); they cost 4 bytes a token.
                # They hold no engine resource.
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
        """Wait until the mesh holds no resources; return the seconds. Raises AssertionError with the resources held."""
        last: dict[str, int] = {}

        async def nothing_held() -> bool:
            nonlocal last
            last = {name: count for name, count in (await self.held()).items() if count}
            return not last

        try:
            return await until(nothing_held, timeout_s, "mesh idle")
        except AssertionError:
            raise AssertionError(f"still held after {timeout_s:g} s: {json.dumps(last, indent=1)}") from None


def role_of(name: str) -> str:
    """Return the role of a part: "decode" of "next-decode-0", "router" of "router-6c9f-x1". Empty: it has none."""
    return next((word for word in reversed(name.split("-")) if word in ROLES), "")


def pool_of(name: str) -> str:
    """Return the pool of a router or a replica, by its name."""
    return name[: name.rindex(role_of(name))].removesuffix("-") or DEFAULT_POOL


async def until(
    condition: Callable[[], Awaitable[bool]] | Callable[[], bool],
    timeout_s: float,
    what: str,
    *,
    every_s: float = 0.005,
) -> float:
    """Wait until `condition` is true; return the seconds. Raises AssertionError naming `what`.

    `timeout_s`: seconds of a quiet machine.
    """
    began_s, bound = time.monotonic(), Patience(timeout_s)
    while True:
        holds = condition()
        if isinstance(holds, Awaitable):
            holds = await holds
        if holds:
            return time.monotonic() - began_s
        assert not bound.is_over, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(every_s)


async def engine_ready(address: str) -> bool:
    """Return whether the model of the engine at `address` is loaded."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with suppress(grpc.RpcError):
            request = service_pb2.ModelReadyRequest(name="tensorrt_llm")
            return bool((await stub.ModelReady(request, timeout=2)).ready)
    return False


async def accepts(address: str) -> bool:
    """Return whether a process accepts connections at `address`."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        return True
    return False


def configure(**sections: Mapping[str, Any]) -> MeshConfig:
    """Return the default configuration with some keys of some sections replaced."""
    default = MeshConfig()
    return MeshConfig(
        **{name: msgspec.structs.replace(getattr(default, name), **keys) for name, keys in sections.items()}
    )
