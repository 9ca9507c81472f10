"""The client of a mesh: makes requests, and the streams of their answers over shared connections."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Unpack

import grpc

from kvmesh.client.addresses import by_region
from kvmesh.client.call_state import CallState
from kvmesh.client.connections import Connections, RemainingQuota, dial
from kvmesh.client.generation import GenerationStream
from kvmesh.client.request_builder import Options, build_request
from kvmesh.client.retry_budget import RetryBudget
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.inference.v1 import inference_pb2 as pb

DEADLINE_S = 120.0

_HOME: Final = "kvmesh-region"
"""Metadata key with the home region of the caller."""


class Client:
    """Streams tokens from a mesh with several frontends. One client per process is enough. It belongs to one event loop.

    Use it as `async with Client(["10.0.0.4:7000", "10.0.0.5:7000"]) as client`, or call `close`. With frontends of several
    regions: `Client(regions={"eu": [...], "us": [...]}, prefer="eu")`.
    """

    def __init__(
        self,
        addresses: Sequence[str] = (),
        *,
        regions: Mapping[str, Sequence[str]] | None = None,
        prefer: str = "",
        key: str = "",
        tenant: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        retry_policy: RetryPolicy | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """Check the arguments without I/O. Raises ValueError.

        `addresses`: frontends as "host:port". Every frontend serves every request.
        `regions`: instead of `addresses`, the frontends by the name of their region, as in the configuration of the mesh.
        `prefer`: the home region. New streams go to another region only while all frontends of the home region are lost.
        The other regions are tried in the order of `regions`.
        `key`: API key. A mesh with tenants needs it, unless the client's certificate names a tenant.
        `tenant`: the tenant that a gateway calls for.
        `credentials`: TLS, made by `grpc.ssl_channel_credentials`. None means plain text.
        `channel_options`: further options of gRPC, for example `("grpc.ssl_target_name_override", "mesh")`.
        `open_channel`: opens a channel to an address, instead of the two options above. The channel must send keepalive
        pings (`grpc.keepalive_time_ms`).
        """
        self._retry_policy = retry_policy or RetryPolicy()
        connect = open_channel or partial(dial, credentials=credentials, options=channel_options)
        metadata = _credentials_metadata(key, tenant)
        if regions is not None:
            metadata.append((_HOME, prefer))
        self._budget = RetryBudget(self._retry_policy.retry_share)
        self._by_region = by_region(addresses, regions, prefer)
        self._connections = Connections(self._by_region, self._retry_policy, connect, metadata)

    def generate(
        self, prompt: str | None = None, *, deadline_s: float = DEADLINE_S, **options: Unpack[Options]
    ) -> GenerationStream:
        """Return the answer to one prompt as an iterator. The first iteration sends the request.

        `deadline_s`: seconds from now until the whole answer must have arrived, failovers included. The iteration raises
        GenerateError. The call itself raises ValueError for a missing or repeated prompt, and for a value that does not fit
        its field. It raises TypeError for an unknown option.
        """
        return self.send(build_request(prompt, **options), deadline_s=deadline_s)

    def send(self, request: pb.GenerateRequest, *, deadline_s: float = DEADLINE_S) -> GenerationStream:
        """Like `generate`, for a ready request. With `options.resume` the answer continues after the received tokens.

        A request without an idempotency key is sent with a new one.
        """
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}: more than 0 s is allowed")
        has_own_key = not (request.idempotency_key or request.options.HasField("resume"))
        if not request.idempotency_key:
            keyed = pb.GenerateRequest()
            keyed.CopyFrom(request)
            keyed.idempotency_key = uuid.uuid4().hex
            request = keyed
        now_s = asyncio.get_running_loop().time()
        self._budget.on_request()
        call_state = CallState(
            request,
            self._retry_policy,
            now_s + deadline_s,
            has_own_key=has_own_key,
            began_s=now_s,
            regions=self._by_region,
            budget=self._budget,
        )
        return GenerationStream(self._connections, call_state)

    @property
    def remaining(self) -> RemainingQuota | None:
        """Remaining quota of the caller, reported with the end of its last answer; None if none was reported."""
        return self._connections.remaining

    async def close(self) -> None:
        """End all streams and connections. Idempotent."""
        await self._connections.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _credentials_metadata(key: str, tenant: str) -> list[tuple[str, str]]:
    """Return the metadata with API key and tenant. Raises ValueError, which does not quote the key."""
    for name, value in (("key", key), ("tenant", tenant)):
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise ValueError(
                f"{name} does not fit a header: ASCII letters, digits and signs without spaces are allowed"
            )
    metadata = [("authorization", f"Bearer {key}")] if key else []
    return [*metadata, ("kvmesh-tenant", tenant)] if tenant else metadata
