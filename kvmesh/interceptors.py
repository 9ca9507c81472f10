"""The interceptor every server has: errors become statuses, and nothing else leaves.

grpc.aio itself would send the text of an uncaught exception to the client.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from kvmesh.errors import MeshError, internal, to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Wrap = Callable[[Any], Any]

STATUS_S: Final = 1.0
"""Longest wait for a peer to take a status; it waits behind messages that the peer does not read."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps every handler of a server.

    - AbortError and CancelledError pass: they are how handlers end on purpose.
    - A MeshError gets its status and details; of an ExceptionGroup the first one found counts.
    - Anything else is a bug: logged with its traceback, INTERNAL with a fixed sentence for the client.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        return rewrapped(
            await continuation(handler_call_details),
            unary=lambda inner: _unary(inner, method),
            streaming=lambda inner: _streaming(inner, method),
        )


def rewrapped(handler: Any, *, unary: Wrap, streaming: Wrap) -> Any:
    """Return a handler as an interceptor found it, None included, with its function wrapped by the kind of its answer."""
    if handler is None:
        return handler
    codecs = handler.request_deserializer, handler.response_serializer
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(streaming(handler.stream_stream), *codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), *codecs)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), *codecs)
    return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *codecs)


def _unary(inner: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # this is where bugs end
            await _end(error, context, method)

    return call


def _streaming(inner: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> None:
        try:
            await answered(inner(request, context), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # this is where bugs end
            await _end(error, context, method)

    return call


async def answered(answer: Any, context: Context) -> None:
    """Let a handler that answers with a stream do so, whether it yields its answers or writes them."""
    if inspect.isasyncgen(answer):
        async with aclosing(answer) as responses:
            async for response in responses:
                await context.write(response)
    else:
        await answer


async def _end(error: BaseException, context: Any, method: str) -> None:
    """End the call with the status of `error`. Never returns normally."""
    for one in _leaves(error):
        if isinstance(one, grpc.aio.AbortError):
            raise one
        if isinstance(one, MeshError):
            await _abort(one, context)
    log.error("bug in handler", exc_info=error, extra={"method": method})
    await _abort(internal(), context)


async def _abort(error: MeshError, context: Any) -> None:
    """Give the call its status, and end the handler though the peer should not take it. Never returns normally.

    A status waits behind what the peer has not read; it stays with gRPC until the peer reads, or goes.
    """
    try:
        async with asyncio.timeout(STATUS_S):
            await context.abort_with_status(to_status(error))
    except grpc.aio.AbortError as abort:
        _forget_later(abort)
        raise
    except (TimeoutError, grpc.aio.InternalError) as why:  # the latter: not even its first message went out
        log.debug("status not taken", extra={"reason": error.reason, "why": repr(why)})
        raise asyncio.CancelledError from None


def _forget_later(abort: grpc.aio.AbortError) -> None:
    """Let go of the frames that `abort` passed through, once its handler is over.

    gRPC keeps it beside the call, and the frames keep the call: 15 KB of gRPC's memory that only the cycle collector frees,
    which rests while the process is idle.
    """

    def forget(_: object) -> None:
        abort.__traceback__ = abort.__context__ = None

    task = asyncio.current_task()
    assert task is not None, "a handler runs in a task"
    task.add_done_callback(forget)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
