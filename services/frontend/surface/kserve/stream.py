"""One ModelStreamInfer call: many requests at the same time, each a task with a call of its own.

1. A message is read by the rules of all client messages, once a part of it is there. The next one is read when the one
   before was taken, so that a stream holds one message.
2. A request that ends with an error has a response with `error_message`. The stream stays open.
3. The client half-closes: the stream ends when its last request does.
4. The stream is cancelled, or its deadline passes: so are all of its requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from kvmesh.errors import MeshError, internal
from kvmesh.tasks import end
from services.frontend.surface.kserve import ensemble, responses
from services.frontend.surface.kserve.asked import Asked, Inference
from services.frontend.surface.kserve.faults import draining, named, stream_full, unread
from services.frontend.surface.kserve.idle_streams import IDLE_S, IdleStreams, expired
from services.frontend.surface.kserve.infer_call import InferCall
from services.frontend.surface.kserve.inferences import Inferences
from services.frontend.surface.kserve.responses import Responses
from services.frontend.surface.kserve.stream_call import StreamCall
from services.frontend.surface.kserve.stream_output import StreamOutput

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 1_024
"""Live requests of one stream. More are refused."""

ERROR_S: Final = 5.0
"""Time for a client to take an error. One that reads nothing for so long loses its stream."""

GRPC_ERROR: Final = "triton_grpc_error"
"""Metadata key. With "true" an error is the status of the stream, and ends it."""

_OVER: Final = (grpc.aio.UsageError, grpc.aio.InternalError)
"""Errors of a write after the end of the call."""


class InferStream:
    """See the module."""

    def __init__(self, call: StreamCall, inferences: Inferences, idle: IdleStreams) -> None:
        """Identify the caller. Raises MeshError."""
        self.peer = call.peer
        self._call = call
        self._caller = inferences.caller(call)
        self._inferences = inferences
        self._idle = idle
        self._output = StreamOutput(call)
        self._ends_on_error = call.metadata.get(GRPC_ERROR) == "true"
        self._live: dict[asyncio.Task[None], InferCall] = {}
        """Tasks of requests, with their calls."""
        self._stopped: set[asyncio.Task[None]] = set()
        """Tasks that the client stopped."""
        self._is_input_over = False
        self._input_error: MeshError | None = None
        self._is_draining = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve the stream to its end. Raises MeshError with its status."""
        receiving = asyncio.create_task(self._receive(), name="kserve-input")
        try:
            self._rest()
            await self._end
        finally:
            self._wake()
            if self._end.done() and not self._end.cancelled():
                self._end.exception()  # seen, also if the stream is cancelled
            else:
                self._end.cancel()
            await end([receiving, *self._live])
            await self._output.close()

    def end(self, error: BaseException) -> None:
        """End the stream and its requests with `error`. Idempotent."""
        if not self._end.done():
            self._end.set_exception(error)

    def drain(self) -> None:
        """Take no more requests: end the stream when it has none."""
        self._is_draining = True
        if not self._live:
            self.end(draining())

    # Input.

    async def _receive(self) -> None:
        try:
            while await self._call.arrives():
                arrived_s = self._inferences.clock.now_s()
                await self._take(await self._inferences.read(self._call, self._caller), arrived_s)
        except asyncio.CancelledError:
            raise
        except MeshError as error:
            # Its message did not come. The requests before it run to their end.
            self._input_error = error
        except _OVER as error:
            log.debug("the stream ended", extra={"peer": self.peer, "why": str(error)})
            self._end.cancel()
        except BaseException as error:  # noqa: BLE001  # the end of the call, or a bug: the handler has it
            self.end(error)
        self._is_input_over = True
        self._check_end()

    async def _take(self, inference: Inference, arrived_s: float) -> None:
        """Begin a request, and return when its message is no longer needed."""
        asked = inference.asked
        if len(self._live) >= REQUESTS_MAX:
            await self._refuse(asked, stream_full(REQUESTS_MAX))
            return
        is_text = inference.contract is ensemble.CONTRACT
        answer = Responses(asked, is_text=is_text, wraps=True)
        if asked.stops and inference.error is None:
            await self._stop(asked, answer)
            return
        taken = asyncio.get_running_loop().create_future()

        def on_read() -> None:
            if not taken.done():
                taken.set_result(None)

        call = InferCall(
            self._call,
            inference,
            answer,
            arrived_s,
            self._inferences.clock,
            try_write=self._output.try_write,
            write=self._output.write,
            on_read=on_read,
        )
        task = asyncio.create_task(self._serve(call, inference), name="kserve-request")
        self._wake()
        self._live[task] = call
        task.add_done_callback(self._done)
        task.add_done_callback(lambda _: on_read())
        await taken

    async def _stop(self, asked: Asked, answer: Responses) -> None:
        """End the requests with the id of `asked`, as TensorRT-LLM does. It is no error if there is none.

        A request with its last response on its way is left alone: its client gets exactly one.
        """
        if not asked.id:
            await self._refuse(asked, unread("id", "empty", "the id of the request to stop"))
            return
        for task, call in self._live.items():
            if call.id == asked.id and not call.is_ending:
                call.is_ending = True
                self._stopped.add(task)
                task.cancel()
        if asked.wants_empty_final:
            await self._write(answer.nothing())

    # Requests.

    async def _serve(self, call: InferCall, inference: Inference) -> None:
        asked = inference.asked
        try:
            await self._inferences.run(call, inference)
        except MeshError as error:
            call.is_ending = True
            await self._refuse(asked, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task not in self._stopped:
                raise
            assert task is not None
            task.uncancel()
            await self._write(call.responses.cancelled())
        except Exception:
            log.exception("bug in a request of a stream")
            call.is_ending = True
            await self._refuse(asked, internal())

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._live[task]
        self._stopped.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)
        if not self._live:
            self._rest()

    async def _refuse(self, asked: Asked, error: MeshError) -> None:
        if self._ends_on_error:
            self.end(named(error))
            return
        await self._write(responses.refused(asked, error))

    async def _write(self, response: bytes) -> None:
        """Write a response that no request waits for. A client that does not take it loses its stream."""
        try:
            async with asyncio.timeout(ERROR_S):
                await self._output.write(response)
        except TimeoutError:
            self.end(MeshError("SLOW_READER", f"no message was read for {ERROR_S:g} s"))
        except _OVER as error:
            log.debug("a response was not written", extra={"peer": self.peer, "why": str(error)})

    # Idle streams.

    def _rest(self) -> None:
        """Note that the stream has no request."""
        if self._end.done():
            return
        if self._is_input_over:
            self._check_end()
        elif self._is_draining:
            self.end(draining())
        else:
            try:
                self._idle.open(self)
            except MeshError as error:
                self.end(error)
                return
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(IDLE_S, lambda: self.end(expired()))

    def _wake(self) -> None:
        """Note that the stream has a request, or is over."""
        self._idle.close(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_end(self) -> None:
        if not self._is_input_over or self._live or self._end.done():
            return
        if self._input_error is not None:
            self._end.set_exception(self._input_error)
        else:
            self._end.set_result(None)
