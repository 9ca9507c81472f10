"""A fake Triton server that offers step frames, with the step streams of the engines' contract."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, service_pb2

from engines.contract import request_parsing
from engines.contract.outputs import RequestOutput
from engines.contract.request import ControlRequest, EngineRequest
from engines.contract.step_frames import VERSION, SlotProgress
from engines.contract.step_streams import SlotStream, StepStreams
from engines.contract.tensors import STEP_FRAME
from kvmesh.triton.errors import CallError, EngineLost
from tests.unit.conformance.fake_server import FakeServer, Stream, add_output


@dataclass(eq=False)
class FramedCall(Stream):
    """A request on an exchange. `slot`: where its outputs go; None until its slot is open."""

    exchange: FakeExchange | None = None
    slot: SlotStream | None = None


@dataclass(eq=False)
class FakeExchange:
    """A stream of many requests, as TritonClient gives it. It is the sender of the frames of its step stream."""

    server: FramedServer
    key: int = 0
    was_cancelled: bool = False
    _queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def write(self, request: FramedCall) -> None:
        """See Exchange."""
        request.exchange = self
        if self.server.is_alive:
            self.server.take(request)
        else:
            self.put(EngineLost("the server is gone"))

    async def read(self) -> Any:
        """See Exchange."""
        response = await self._queue.get()
        if isinstance(response, CallError):
            raise response
        return response

    def cancel(self) -> None:
        """See Exchange."""
        self.was_cancelled = True
        self.put(EngineLost("cancelled"))
        self.server.end_stream(self.key)

    def put(self, response: Any) -> None:
        """Add a response."""
        self._queue.put_nowait(response)

    def send(self, frame: bytes, *, is_last: bool) -> None:
        """See FrameSender."""
        response = service_pb2.ModelStreamInferResponse()
        add_output(response.infer_response, STEP_FRAME, np.frombuffer(frame, np.uint8))
        self.put(response)

    def is_cancelled(self) -> bool:
        """See FrameSender."""
        return self.was_cancelled


class FramedServer(FakeServer):
    """A FakeServer with step frames."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outputs[STEP_FRAME] = "UINT8"
        self.parameters["step_frames"] = str(VERSION)
        self.step_streams = StepStreams()

    def request(self, inputs: list[InferInput], request_id: str, parameters: dict[str, str]) -> Any:
        """See TritonClient."""
        return FramedCall(self, inputs, request_id, parameters)

    def exchange(self) -> Any:
        """See TritonClient."""
        return FakeExchange(self)

    def submit(self, stream: Stream, request: EngineRequest) -> None:
        """Open the slot of a framed call, and run the call."""
        slot = request_parsing.parse_step_slot(json.dumps(stream.parameters))
        if slot is not None:
            assert isinstance(stream, FramedCall)
            progress = SlotProgress(slot.slot, stream.options.has_log_probs, stream.options.has_perf)
            opened = SlotStream(stream.key, self.step_streams.find(slot.stream), progress)
            opened.stream.open_slot(slot.slot, opened)
            stream.slot = opened
        super().submit(stream, request)

    def serve(self, kind: ControlRequest, stream: Stream) -> None:
        """Serve the two requests of step streams as well."""
        parameters = json.dumps(stream.parameters)
        if kind is ControlRequest.STEP_STREAM:
            assert isinstance(stream, FramedCall) and stream.exchange is not None
            name = request_parsing.parse_step_stream(parameters)
            self.step_streams.attach(name, stream.exchange, lambda: next(self._keys))
            stream.exchange.key = self.step_streams.find(name).key
        elif kind is ControlRequest.STEP_CANCEL:
            step_stream = self.step_streams.find(request_parsing.parse_step_stream(parameters))
            self.cancel_slots(step_stream.cancel(request_parsing.parse_step_slots(parameters)))
        else:
            super().serve(kind, stream)

    def cancel_slots(self, keys: list[int]) -> None:
        """End calls by their keys."""
        for key in keys:
            if key in self._sequences:
                self.cancel(self._sequences[key])
        self.go()

    def end_stream(self, key: int) -> None:
        """End the step stream of a client that has left, and its calls."""
        self.cancel_slots(self.step_streams.end(key))

    def refuse(self, stream: Stream, text: str) -> None:
        """Fail a framed call by a row, or by Triton's error if it has no slot."""
        if not isinstance(stream, FramedCall):
            super().refuse(stream, text)
        elif stream.slot is not None:
            stream.slot.send(RequestOutput(error=text, is_final=True))
        else:
            assert stream.exchange is not None
            response = service_pb2.ModelStreamInferResponse(error_message=text)
            response.infer_response.id = stream.request_id
            stream.exchange.put(response)

    def deliver(self, key: int, output: RequestOutput) -> None:
        """Send the output of a framed call as a row."""
        stream = self.streams.get(key)
        if not isinstance(stream, FramedCall) or stream.slot is None:
            super().deliver(key, output)
            return
        if output.is_final:
            self.streams.pop(key)
            self._sequences.pop(key, None)
        self.send_row(stream.slot, output)

    def send_row(self, slot: SlotStream, output: RequestOutput) -> None:
        """Send a frame with one row."""
        slot.send(output)
