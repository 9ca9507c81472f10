"""The interceptor every server has: bad messages and errors become statuses, and nothing else leaves.

grpc.aio itself would send the text of an uncaught exception to the client, and
would answer bytes that are no message with INTERNAL.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

log = logging.getLogger(__name__)

INTERNAL_TEXT: Final = "Internal error; the log of the server has the cause."
STATUS_METADATA: Final = "grpc-status-details-bin"
ERROR_DOMAIN: Final = "kvmesh"

Context = grpc.aio.ServicerContext[Any, Any]


class Status(NamedTuple):
    """What a client is told: code, one sentence, trailing metadata (google.rpc details)."""

    code: grpc.StatusCode
    text: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


Translate = Callable[[BaseException], Status | None]
"""The one table from error to status; None for an exception it does not know."""


class BadMessage(ValueError):
    """The bytes of a request are no acceptable message: too large, or not decodable."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field

    def status(self) -> Status:
        """Return INVALID_ARGUMENT with BadRequest details."""
        text = str(self)
        details = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=text)
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=text)
        for detail in (
            error_details_pb2.BadRequest(field_violations=[violation]),
            error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT", domain=ERROR_DOMAIN),
        ):
            details.details.add().Pack(detail)
        metadata = ((STATUS_METADATA, details.SerializeToString()),)
        return Status(grpc.StatusCode.INVALID_ARGUMENT, text, metadata)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps every handler of a server.

    - A unary request is decoded here, so that too many bytes and invalid UTF-8 are INVALID_ARGUMENT.
    - AbortError and CancelledError pass: they are how handlers end on purpose.
    - What `translate` knows gets its status; of an ExceptionGroup the first exception it knows counts.
    - Anything else is a bug: logged with its traceback, INTERNAL with a fixed sentence for the client.
    """

    def __init__(self, translate: Translate, message_bytes_max: int) -> None:
        self._translate = translate
        self._message_bytes_max = message_bytes_max

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        decode: Callable[[Any], Any]
        if handler.request_streaming:
            decode, deserialize = _unchanged, handler.request_deserializer
        else:
            decode, deserialize = self._decoder(handler.request_deserializer), None
        if handler.response_streaming:
            inner = handler.stream_stream or handler.unary_stream
            wrapped = self._streaming(inner, decode, method)
            kind = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary or handler.unary_unary
            wrapped = self._unary(inner, decode, method)
            kind = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return kind(wrapped, deserialize, handler.response_serializer)

    def _decoder(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
        def decode(raw: bytes) -> Any:
            if len(raw) > self._message_bytes_max:
                raise BadMessage(
                    "message", f"message has {len(raw)} bytes; 0 to {self._message_bytes_max} are allowed"
                )
            try:
                return raw if deserialize is None else deserialize(raw)
            except DecodeError as error:
                raise BadMessage(
                    "message", "message cannot be decoded; well-formed fields and valid UTF-8 are allowed"
                ) from error

        return decode

    def _unary(self, inner: Any, decode: Callable[[Any], Any], method: str) -> Any:
        async def call(request: Any, context: Context) -> Any:
            try:
                return await inner(decode(request), context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # this is where bugs end
                await self._end(error, context, method)

        return call

    def _streaming(self, inner: Any, decode: Callable[[Any], Any], method: str) -> Any:
        async def call(request: Any, context: Context) -> None:
            try:
                answer = inner(decode(request), context)
                if inspect.isasyncgen(answer):
                    async with aclosing(answer) as responses:
                        async for response in responses:
                            await context.write(response)
                else:
                    await answer
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # this is where bugs end
                await self._end(error, context, method)

        return call

    async def _end(self, error: BaseException, context: Context, method: str) -> None:
        for one in _leaves(error):
            if isinstance(one, grpc.aio.AbortError):
                raise one
            status = one.status() if isinstance(one, BadMessage) else self._translate(one)
            if status is not None:
                await context.abort(status.code, status.text, status.metadata)
        log.error("bug in handler", exc_info=error, extra={"method": method})
        await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


def _unchanged(request: Any) -> Any:
    return request


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
