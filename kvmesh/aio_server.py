"""A grpc.aio server that survives method names that are not UTF-8 (docs/decisions/0027).

grpcio 1.85 decodes the name of an unknown method inside the loop that accepts calls. One header frame with other bytes
than UTF-8 in `:path` ends that loop. The server then stops for good, for all callers, and the attack needs no credentials.

Methods that are registered by name are matched as bytes, below Python. So calls of all other methods are answered here,
and their names are not decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as stock

_UNKNOWN: Final = "unknown method"
"""Replaces the method's name in names of tasks."""


class _Server(stock.Server):
    """The server of grpcio with another acceptor."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]], options: Sequence[tuple[str, Any]]
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = stock._augment_channel_arguments(options, None)  # noqa: SLF001  # as stock.Server does
        self._server = _Acceptor(self._loop, None, (), interceptors, arguments, None)


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Server:
    """Return a server like that of `grpc.aio.server`. It serves only methods of `add_registered_method_handlers`.

    Generated code registers methods in this way. Other methods are UNIMPLEMENTED. Must run on the event loop.
    """
    made: Any = _Server(interceptors, options)  # the stubs know one type of servers
    return cast("grpc.aio.Server", made)


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc]  # the module has no types
    """Accepts calls for `_Server`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *others: Any) -> None:
        super().__init__(loop, *others)
        self._running = loop
        self._answers: set[asyncio.Task[None]] = set()
        self._nothing = cygrpc._MethodResolver([], {})  # noqa: SLF001

    async def _request_call(self) -> Any:
        """Accept and answer calls of unregistered methods. Never returns such a call to the loop of grpcio."""
        while True:
            call = await super()._request_call()
            handling = cygrpc._handle_rpc(_UNKNOWN, self._nothing, (), call, self._running, False)  # noqa: SLF001
            answer = self._running.create_task(
                cygrpc._schedule_rpc_coro(handling, call, self._running, _UNKNOWN)  # noqa: SLF001
            )
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
