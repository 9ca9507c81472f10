"""The responses of a stub engine: those of one call of ModelStreamInfer, and of the long-lived requests in it."""

from __future__ import annotations

import asyncio
from typing import Any

from tritonclient.grpc import service_pb2

from engines.contract.tensors import MODEL_NAME, STEP_FRAME


class Exchange:
    """The responses of one call of ModelStreamInfer. It ends with the requests and the long-lived ones among them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.open_requests = 1
        """Long-lived requests without an end, and 1 until the client has sent its last request."""
        self.is_closed = False
        self._responses: asyncio.Queue[Any] = asyncio.Queue()

    def respond(self, request_id: str, output: str, payload: bytes) -> None:
        """Send a response with one tensor of bytes."""
        response = service_pb2.ModelStreamInferResponse()
        answer = response.infer_response
        answer.model_name, answer.id = MODEL_NAME, request_id
        answer.outputs.add(name=output, datatype="UINT8", shape=[1, len(payload)])
        answer.raw_output_contents.append(payload)
        self._responses.put_nowait(response)

    def refuse(self, request_id: str, text: str) -> None:
        """Send the error of a request."""
        response = service_pb2.ModelStreamInferResponse(error_message=text)
        response.infer_response.id = request_id
        self._responses.put_nowait(response)

    def end_request(self) -> None:
        """Note the end of a long-lived request, or of all requests."""
        self.open_requests -= 1
        if not self.open_requests:
            self._responses.put_nowait(None)

    async def next(self) -> Any:
        """Return the next response. None: the call is over."""
        return await self._responses.get()


class FrameSender:
    """Implements FrameSender of the contract for a step-stream request."""

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        exchange.open_requests += 1
        self._exchange = exchange
        self._id = request_id

    def send(self, frame: bytes, *, is_last: bool) -> None:
        """See the contract."""
        self._exchange.respond(self._id, STEP_FRAME, frame)
        if is_last:
            self._exchange.end_request()

    def is_cancelled(self) -> bool:
        """See the contract."""
        return self._exchange.is_closed


class Reports:
    """Implements Subscriber of the contract. The publisher's thread calls it, the loop sends."""

    def __init__(self, exchange: Exchange, output: str, max_bytes: int | None) -> None:
        exchange.open_requests += 1
        self._exchange = exchange
        self._output = output
        self._bytes_left = float("inf") if max_bytes is None else max_bytes

    def send(self, payload: bytes) -> None:
        """See the contract."""
        self._bytes_left -= len(payload)
        self._soon(self._exchange.respond, self._output, self._output, payload)

    def finish(self, error: str | None) -> None:
        """See the contract."""
        if error is not None:
            self._soon(self._exchange.refuse, self._output, error)
        self._soon(self._exchange.end_request)

    def is_full(self) -> bool:
        """See the contract."""
        return self._bytes_left <= 0

    def _soon(self, call: Any, *arguments: object) -> None:
        if not self._exchange.is_closed:
            self._exchange.loop.call_soon_threadsafe(call, *arguments)
