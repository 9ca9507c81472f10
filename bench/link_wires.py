"""Cheap gRPC clients of a frontend, on the transport of the links: Generate calls, and KServe requests on one stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from bench import generation, kserve
from bench.kserve import Responses
from bench.word_load import Arrive
from kvmesh.http2.client import LinkChannel
from kvmesh.http2.connection import ConnectionLimits
from kvmesh.inference.v1 import inference_pb2 as pb

GENERATE: Final = "/kvmesh.inference.v1.InferenceService/Generate"
STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
MESSAGE_BYTES: Final = 4 << 20
LIMITS: Final = ConnectionLimits(keepalive_s=60.0, handshake_s=10.0)


def link_channel(address: str) -> LinkChannel:
    """Return a channel to host:port."""
    return LinkChannel(address, None, message_bytes_max=MESSAGE_BYTES, limits=LIMITS)


class LinkedGenerateWire:
    """Implements Wire with Generate calls on one connection. `make` makes the request of a text and its tokens."""

    def __init__(self, channel: LinkChannel, make: Callable[[str, int], pb.GenerateRequest]) -> None:
        self._make = make
        self._begin = channel.stream_stream(
            GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        check, call = generation.AnswerCheck(tokens), self._begin()
        try:
            with suppress(grpc.aio.UsageError):  # the call is over, and its status tells why
                await call.write(self._make(text, tokens))
                await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                if came := check.take(message):
                    arrive(came)
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                return f"{code.name}: {await call.details()}"
        finally:
            call.cancel()
        return check.verdict()


class KserveWire:
    """Implements Wire with requests of one model on one ModelStreamInfer stream, told apart by their ids.

    A cancelled request ends the stream and all its requests. The next request opens another stream.
    """

    def __init__(self, channel: LinkChannel, model: str, seed: int = 1) -> None:
        """`model`: one of kserve.MODELS. One with token ids gets drawn ids, one per word."""
        self._model = model
        self._draw = random.Random(seed)
        self._open = channel.stream_stream(
            STREAM_INFER,
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._responses = Responses()

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        if self._call is None:
            self._call, self._responses = self._open(), Responses()
            self._reading = asyncio.create_task(self._read(self._call, self._responses), name="responses")
        call, responses = self._call, self._responses
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        request_id = responses.begin(tokens, arrive, ended.set_result)
        request = kserve.request(self._model, request_id, text, tokens, self._draw)
        try:
            with suppress(grpc.aio.UsageError):  # the call is over: the reader tells it to all requests
                await call.write(request)
            return await ended
        except asyncio.CancelledError:
            responses.forget(request_id)
            self.close()
            raise

    def close(self) -> None:
        """End the stream."""
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._call = self._reading = None

    async def _read(self, call: Any, responses: Responses) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            responses.take(message)
        code = await call.code()
        responses.end(f"{code.name}: {await call.details()}")
        if self._call is call:
            self._call = self._reading = None
