"""Interface of a call for handlers: metadata, deadline, read, write. It hides the context of the transport.

So the same handler runs on grpc.aio, on the batched transport and, without a socket, in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc

Request = TypeVar("Request", covariant=True)
Response = TypeVar("Response", contravariant=True)


class CallHead(Protocol):
    """The part of a call that is known before its message: metadata, certificate and connection identify the caller."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text metadata of the call. Keys are lower case."""
        ...

    @property
    def identities(self) -> Sequence[str]:
        """Names in the peer's certificate, verified by the transport. Empty: the server requested no certificate.

        These are the alternative names, or the common name of a certificate without alternative names (RFC 6125, 6.4.4).
        """
        ...

    @property
    def peer(self) -> str:
        """Name of the connection: transport, address and port of the peer."""
        ...


class Call(CallHead, Protocol[Request, Response]):
    """One call of a client."""

    def remaining_s(self) -> float | None:
        """Return the seconds until the client's deadline, or None without a deadline."""
        ...

    async def read(self) -> Request | None:
        """Return the next message, or None when the client half-closed."""
        ...

    async def write(self, message: Response) -> None:
        """Send one message, and return when the transport has taken it. One writer at a time."""
        ...

    def try_write(self, message: Response) -> bool:
        """Send one message at once. Not called while a `write` is in progress. Raises as `write` does if the call is over.

        True: the transport took the message, and its flow-control window is open. False: the message was not taken;
        use `write`. A transport that cannot tell returns False.
        """
        ...

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        """Send `trailers` with the status of a successful call. A MeshError has its own trailers."""
        ...


class GrpcCall:
    """A Call on grpc.aio, or on the batched transport, whose contexts have the same methods."""

    __slots__ = ("_context", "_metadata", "_try")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._metadata: dict[str, str] | None = None
        self._try: Callable[[Any], bool] | None = getattr(context, "try_write", None)
        """Of the batched transport; grpc.aio has none."""

    @property
    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            pairs = self._context.invocation_metadata() or ()
            self._metadata = {key: value for key, value in pairs if isinstance(value, str)}
        return self._metadata

    @property
    def identities(self) -> Sequence[str]:
        found = self._context.auth_context()
        names = found.get("x509_subject_alternative_name") or found.get("x509_common_name") or ()
        return [name.decode(errors="replace") for name in names]

    @property
    def peer(self) -> str:
        return str(self._context.peer())

    def remaining_s(self) -> float | None:
        remaining = self._context.time_remaining()
        # Some versions of grpc.aio report a very long deadline for a call without one.
        return None if remaining is None or remaining > 10**8 else float(remaining)

    async def read(self) -> Any:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]  # stubs lack it

    async def write(self, message: Any) -> None:
        await self._context.write(message)

    def try_write(self, message: Any) -> bool:
        return self._try is not None and bool(self._try(message))

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        self._context.set_trailing_metadata(tuple(trailers.items()))
