"""The client of a mesh. A shell."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import grpc

from kvmesh.client.call_state import CallState
from kvmesh.client.connections import Connections, RemainingQuota, dial
from kvmesh.client.generation import GenerationStream
from kvmesh.client.request_builder import Options, build_request
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.inference.v1 import inference_pb2 as pb

DEADLINE_S = 120.0


class Client:
    """Streams tokens from the mesh behind several frontends. One per process is enough; for one event loop.

    Use it as `async with Client(["10.0.0.4:7000", "10.0.0.5:7000"]) as client`, or call `close`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        key: str = "",
        tenant: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        retry_policy: RetryPolicy | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """`addresses`: frontends as "host:port"; any of them serves any request. No I/O yet.

        `key`: API key, needed where the mesh has tenants and no certificate of the client's names one. `tenant`: for whom
        a gateway calls. `credentials`: TLS, as made by `grpc.ssl_channel_credentials`; None: plain text.
        `channel_options`: options of gRPC on top, for example `("grpc.ssl_target_name_override", "mesh")`. `open_channel`:
        how to connect to an address, instead of those two; the channel must ping (`grpc.keepalive_time_ms`). Raises
        ValueError.
        """
        self._retry_policy = retry_policy or RetryPolicy()
        connect = open_channel or partial(dial, credentials=credentials, options=channel_options)
        self._connections = Connections(
            addresses, self._retry_policy, connect, _credentials_metadata(key, tenant)
        )

    def generate(
        self, prompt: str | None = None, *, deadline_s: float = DEADLINE_S, **options: Unpack[Options]
    ) -> GenerationStream:
        """Return the answer to one prompt, to be iterated over; nothing is sent before.

        `deadline_s`: seconds from now until the whole answer must be here, over however many frontends. Errors come from
        the iteration, as GenerateError. This raises ValueError if the prompt is missing or given twice or a value does
        not fit its field, TypeError for an unknown option.
        """
        return self.send(build_request(prompt, **options), deadline_s=deadline_s)

    def send(self, request: pb.GenerateRequest, *, deadline_s: float = DEADLINE_S) -> GenerationStream:
        """The same for a request that is built already; with `options.resume` set it goes on behind its received tokens."""
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}: more than 0 s is allowed")
        has_own_key = not (request.idempotency_key or request.options.HasField("resume"))
        if not request.idempotency_key:
            keyed = pb.GenerateRequest()
            keyed.CopyFrom(request)
            keyed.idempotency_key = uuid.uuid4().hex
            request = keyed
        now_s = asyncio.get_running_loop().time()
        call_state = CallState(
            request, self._retry_policy, now_s + deadline_s, has_own_key=has_own_key, began_s=now_s
        )
        return GenerationStream(self._connections, call_state)

    @property
    def remaining(self) -> RemainingQuota | None:
        """What the caller's limits leave it, as told with the end of its last answer; None: nothing was told."""
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
    """Return the metadata that says who calls. Raises ValueError, which does not quote the key."""
    for name, value in (("key", key), ("tenant", tenant)):
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise ValueError(
                f"{name} is no text that a header can hold: letters, digits and signs are allowed"
            )
    said = [("authorization", f"Bearer {key}")] if key else []
    return [*said, ("kvmesh-tenant", tenant)] if tenant else said
