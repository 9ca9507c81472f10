"""Calls to the control plane of one mesh: finds its processes, and follows one redirect to the leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc

from kvmesh.cli.control.failures import NO_CONTROL_PLANE, ControlFailed, lost, refused, unanswered
from kvmesh.cli.control.location import addresses
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc as stubs
from kvmesh.control.v1 import region_pb2_grpc, shadow_pb2_grpc, warm_up_pb2_grpc
from kvmesh.errors import ErrorDetails, from_rpc_error
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.roles import CONTROL
from kvmesh.snapshot.control_processes import read_control_processes
from kvmesh.trust.names import OPERATOR
from kvmesh.trust.peers import Trust

CONNECT_S: Final = 2.0
"""Time for a connection. Nothing was sent to a process without one, so the next process is tried."""

CALL_S: Final = 10.0
"""Time for an answer."""

SILENCE_S: Final = 5.0
"""A watched rollout comes each second. After this time without one, the connection counts as lost."""

_REGION_METHODS: Final = ("ListRegions", "DrainRegion", "RestoreRegion", "AvoidRegion")
_SHADOW_METHODS: Final = ("StartShadow", "GetShadow", "StopShadow")
_WARM_UP_METHODS: Final = (
    *("ListLives", "ListProfiles", "QuarantineProfile", "AddPrefix", "ListPrefixes", "DeletePrefix"),
)
_SERVICES: Final[dict[str, Any]] = {
    **dict.fromkeys(_REGION_METHODS, region_pb2_grpc.RegionServiceStub),
    **dict.fromkeys(_SHADOW_METHODS, shadow_pb2_grpc.ShadowServiceStub),
    **dict.fromkeys(_WARM_UP_METHODS, warm_up_pb2_grpc.WarmUpServiceStub),
}
"""Service of each method that is not of the ControlPlaneService."""

_GONE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses of a process that died, froze or shut down during a call."""


class NotConnected(Exception):
    """No connection to one control process. The text is the reason."""


class ControlLost(Exception):
    """The connection broke during a call, before the answer."""


class ControlClient:
    """Calls of one command. Every method raises ControlFailed."""

    def __init__(
        self,
        mesh: FoundMesh,
        configured: Sequence[str] = (),
        outage: Callable[[Sequence[str]], ControlFailed] = unanswered,
    ) -> None:
        """`configured`: addresses to dial, in place of those that Redis and mesh.json name.

        `outage` makes the failure of a call that no process answers from the fault of each. Of the certificates in the
        configuration only those of [trust] are read: a pod of the control plane has no others. Raises ConfigError.
        """
        self._outage = outage
        self._name = mesh.config.mesh.name
        self._listed = mesh.addresses_of(CONTROL)
        self._configured = tuple(configured)
        self._trust = Trust(mesh.config, OPERATOR)
        self._redis = RedisLink(mesh.redis_url) if not configured else None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for address in list(self._channels):
            await self._forget(address)
        if self._redis is not None:
            await self._redis.close()

    async def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the control processes, the leader's first."""
        if self._redis is None:
            return self._configured
        leased, leader, fault = list[str](), None, ""
        try:
            leased = [each.address for each in await read_control_processes(self._redis, self._name)]
            leader = await self._redis.execute("GET", key(self._name, "control", "leader"))
        except RedisUnavailable as error:
            fault = str(error)
        found = addresses(leader, leased, self._listed)
        if not found:
            if fault:
                raise ControlFailed((f"The control processes are unknown: {fault}.",), code="UNAVAILABLE")
            raise ControlFailed((NO_CONTROL_PLANE,), code="UNAVAILABLE", reason="NO_CONTROL_PLANE")
        return found

    async def read(self, method: str, request: Any) -> Any:
        """Call `method`, which changes nothing. A lost answer is asked for at the next process."""
        return await self._call(method, request, again="")

    async def write(self, method: str, request: Any, again: str) -> Any:
        """Call `method` at most once. `again`: the command that shows whether a call without an answer is in force."""
        return await self._call(method, request, again)

    async def follow(self, rollout: str) -> AsyncGenerator[tuple[str, pb.Rollout], None]:
        """Yield address and rollout after each change and once a second. Raises ControlLost when the connection breaks.

        The leader is asked for anew at each call. Close the generator before the client.
        """
        faults = []
        for address in await self.addresses():
            try:
                async with aclosing(self._followed(address, rollout)) as states:
                    async for state in states:
                        yield state
                return
            except NotConnected as error:
                faults.append(str(error))
        raise self._outage(faults)

    async def _followed(self, address: str, rollout: str) -> AsyncGenerator[tuple[str, pb.Rollout], None]:
        leader = ""
        try:
            async with aclosing(self._stream(address, rollout)) as states:
                async for state in states:
                    yield address, state
        except grpc.aio.AioRpcError as error:
            details = from_rpc_error(error)
            leader = leader_of(details)
            if not leader or leader == address:
                raise refused(details, address) from error
        if not leader:
            return
        try:
            async with aclosing(self._stream(leader, rollout)) as states:
                async for state in states:
                    yield leader, state
        except grpc.aio.AioRpcError as error:
            raise refused(from_rpc_error(error), leader) from error

    async def _stream(self, address: str, rollout: str) -> AsyncGenerator[pb.Rollout, None]:
        stub: Any = stubs.ControlPlaneServiceStub(await self._channel(address))
        call = stub.WatchRollout(pb.WatchRolloutRequest(rollout=rollout))
        try:
            while (answer := await _next(call, address)) is not None:
                yield answer.rollout
        except grpc.aio.AioRpcError as error:
            if not _is_lost(error):
                raise
            await self._forget(address)
            raise ControlLost(address) from error
        finally:
            call.cancel()

    async def _call(self, method: str, request: Any, again: str) -> Any:
        faults = []
        for address in await self.addresses():
            try:
                return await self._redirected(address, method, request)
            except NotConnected as error:
                faults.append(str(error))
            except ControlLost:
                if again:
                    raise lost(address, again) from None
                faults.append(f"{address} broke the connection")
        raise self._outage(faults)

    async def _redirected(self, address: str, method: str, request: Any) -> Any:
        """Call `address`, and the leader that it names instead."""
        try:
            return await self._ask(address, method, request)
        except grpc.aio.AioRpcError as error:
            details = from_rpc_error(error)
            leader = leader_of(details)
            if not leader or leader == address:
                raise refused(details, address) from error
        try:
            return await self._ask(leader, method, request)
        except grpc.aio.AioRpcError as error:
            raise refused(from_rpc_error(error), leader) from error

    async def _ask(self, address: str, method: str, request: Any) -> Any:
        channel = await self._channel(address)
        stub: Any = _SERVICES.get(method, stubs.ControlPlaneServiceStub)(channel)
        try:
            return await getattr(stub, method)(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if not _is_lost(error):
                raise
            await self._forget(address)
            raise ControlLost(address) from error

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._trust.channel(address, CONTROL)
        channel = self._channels[address]
        try:
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
        except TimeoutError:
            await self._forget(address)
            fault = await self._trust.explain(address, CONTROL) or f"no connection within {CONNECT_S:g} s"
            raise NotConnected(f"{address}: {fault}") from None
        return channel

    async def _forget(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(None)


def _is_lost(error: grpc.aio.AioRpcError) -> bool:
    """True if the process died, froze or shut down during the call. A reason is an answer of the process."""
    return error.code() in _GONE and not from_rpc_error(error).reason


async def _next(call: Any, address: str) -> Any:
    """Return the next message of a stream; None at its end."""
    try:
        async with asyncio.timeout(SILENCE_S):
            answer = await call.read()
            return answer if isinstance(answer, pb.WatchRolloutResponse) else None
    except TimeoutError:
        raise ControlLost(address) from None


def leader_of(details: ErrorDetails) -> str:
    """Return the address of the leader that a follower names; empty: the call was not redirected."""
    return (
        details.metadata.get("leader_address", "")
        if details.code is grpc.StatusCode.FAILED_PRECONDITION
        else ""
    )
