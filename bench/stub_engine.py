"""A stub of an engine in Triton: the gRPC service of its server, with step frames, over a PacedEngine.

`python -m bench.stub_engine --step-ms 20` serves loopback until stdin ends. Replicas use it as any engine: it tells its
model's configuration, load reports and KV events. Requests without step frames are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf import text_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench import control
from bench.engines import BLOCK_TOKENS, MODEL_VERSION
from bench.paced_engine import KV_BLOCKS, EngineSize, PacedEngine
from bench.stub_exchange import Exchange, FrameSender, Reports
from engines.contract import errors, model_repository, request_parsing, step_frames
from engines.contract.errors import EngineError
from engines.contract.outputs import RequestOutput
from engines.contract.publisher import Publisher
from engines.contract.request import ControlRequest, RequestKind, RequestLimits
from engines.contract.step_frames import SlotProgress
from engines.contract.step_streams import SlotStream, StepStream, StepStreams
from engines.contract.tensors import INPUTS, MODEL_NAME, OUTPUTS
from kvmesh.server import SERVER_OPTIONS

VOCABULARY: Final = 4096
SEQUENCES_MAX: Final = 1024
MESSAGE_BYTES: Final = 64 << 20
KV_ADDRESS: Final = "127.0.0.1:9"
"""Address without a listener: stubs move no KV blocks."""
_DTYPES: Final = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
SEQUENCE_TOKENS_MAX: Final = 8192
_LIMITS: Final = RequestLimits(VOCABULARY, SEQUENCE_TOKENS_MAX)


def model_config(size: EngineSize, limits: RequestLimits = _LIMITS) -> Any:
    """Return Triton's ModelConfig of the stub."""
    parameters: dict[str, object] = {
        "tokens_per_block": size.block_tokens,
        "kv_blocks": size.kv_blocks,
        "max_sequence_tokens": limits.max_sequence_tokens,
        "vocab_size": limits.vocab_size,
        "max_batch_sequences": SEQUENCES_MAX,
        "kv_address": KV_ADDRESS,
        "model_version": MODEL_VERSION,
        "seeded_resume": "true",
        "release_handoff": "true",
        "disaggregated": "true",
        "end_token": "true",
        "engine_digest": "stub",
        "step_frames": step_frames.VERSION,
    }
    response = service_pb2.ModelConfigResponse()
    text_format.Parse(model_repository.config_pbtxt(INPUTS, OUTPUTS, parameters), response.config)
    return response.config


class StubEngine(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # made without types
    """Serves one PacedEngine. `run` steps it; `close` ends the publisher's thread."""

    def __init__(self, size: EngineSize, step_s: float, limits: RequestLimits = _LIMITS) -> None:
        self.boot_id = secrets.token_hex(8)
        self.late_steps = 0
        """Steps that began more than a quarter of a step late."""
        self._config = model_config(size, limits)
        self._limits = limits
        self._step_s = step_s
        self._engine = PacedEngine(self.boot_id, size, step_s)
        self._streams = StepStreams()
        self._slots: dict[int, SlotStream] = {}
        self._keys = itertools.count(1)
        self._publisher = Publisher(self.boot_id)
        self._publisher.start()

    @property
    def running(self) -> int:
        """Requests that have more tokens to make."""
        return len(self._engine)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()

    async def run(self) -> None:
        """Step at multiples of the step time, until cancelled. A late step does not move the next one."""
        now = asyncio.get_running_loop().time
        next_s = now()
        while True:
            next_s += self._step_s
            late_s = now() - next_s
            if late_s > self._step_s:
                self.late_steps += int(late_s / self._step_s)
                next_s += late_s
            await asyncio.sleep(next_s - now())
            self.late_steps += now() > next_s + self._step_s / 4
            self._step(now())

    def _step(self, now_s: float) -> None:
        by_stream: dict[StepStream, list[tuple[SlotStream, RequestOutput]]] = {}
        for key, output in self._engine.step(now_s):
            slot = self._slots.pop(key) if output.is_final else self._slots[key]
            by_stream.setdefault(slot.stream, []).append((slot, output))
        for stream, outputs in by_stream.items():
            stream.send_step(outputs)
        self._publisher.publish(self._engine.take_events(), self._engine.load())

    # The service. The names are those of the protocol.

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """See Triton's protocol."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """See Triton's protocol."""
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """See Triton's protocol."""
        return service_pb2.ModelReadyResponse(ready=request.name == MODEL_NAME)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """See Triton's protocol."""
        return service_pb2.ModelConfigResponse(config=self._config)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """See Triton's protocol."""
        response = service_pb2.ModelMetadataResponse(name=MODEL_NAME, versions=["1"], platform="python")
        for told, known in ((response.inputs, INPUTS), (response.outputs, OUTPUTS)):
            for one in known:
                told.add(name=one.name, datatype=one.data_type.removeprefix("TYPE_"), shape=[-1, *one.dims])
        return response

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """See Triton's protocol. The end of the call ends its step streams and subscriptions."""
        exchange, keys = Exchange(), list[int]()
        reading = asyncio.create_task(self._read(requests, exchange, keys), name="requests")
        try:
            while (response := await exchange.next()) is not None:
                yield response
        finally:
            exchange.is_closed = True
            reading.cancel()
            for key in keys:
                self._publisher.unsubscribe(key)
                for slot in self._streams.end(key):
                    self._cancel(slot)

    async def _read(self, requests: AsyncIterator[Any], exchange: Exchange, keys: list[int]) -> None:
        async for request in requests:
            try:
                self._take(request, exchange, keys)
            except EngineError as error:
                exchange.refuse(request.id, str(error))
        exchange.end_request()

    def _take(self, request: Any, exchange: Exchange, keys: list[int]) -> None:
        """Take one request. `keys` gets those of step streams and subscriptions. Raises EngineError."""
        tensors = dict(zip((one.name for one in request.inputs), range(len(request.inputs)), strict=True))

        def tensor(name: str) -> npt.NDArray[Any] | None:
            if name not in tensors:
                return None
            index = tensors[name]
            head = request.inputs[index]
            flat = np.frombuffer(request.raw_input_contents[index], _DTYPES[head.datatype])
            return flat.reshape(tuple(head.shape))

        def next_key() -> int:
            keys.append(next(self._keys))
            return keys[-1]

        parameters = json.dumps({name: one.string_param for name, one in request.parameters.items()})
        kind = request_parsing.parse_request_kind(parameters, tensor)
        match kind:
            case ControlRequest.STOP:
                for key in self._engine.keys_of(request.id):
                    self._cancel(key)
            case ControlRequest.RELEASE_HANDOFF:
                self._engine.release(request_parsing.parse_handoff(tensor))
            case ControlRequest.STEP_STREAM:
                name = request_parsing.parse_step_stream(parameters)
                self._streams.attach(name, FrameSender(exchange, request.id), next_key)
            case ControlRequest.STEP_CANCEL:
                stream = self._streams.find(request_parsing.parse_step_stream(parameters))
                for key in stream.cancel(request_parsing.parse_step_slots(parameters)):
                    self._cancel(key)
            case ControlRequest.LOAD_REPORT | ControlRequest.KV_EVENTS:
                max_bytes = request_parsing.parse_max_bytes(parameters)
                self._subscribe(kind, parameters, Reports(exchange, kind.value, max_bytes), next_key())
            case _:
                self._generate(kind, request.id, parameters, tensor)

    def _subscribe(self, kind: ControlRequest, parameters: str, reports: Reports, key: int) -> None:
        if kind is ControlRequest.LOAD_REPORT:
            self._publisher.subscribe_load(key, reports)
            return
        cursor = request_parsing.parse_event_cursor(parameters)
        # The snapshot holds all events, so those of before must not follow it.
        self._publisher.publish(self._engine.take_events(), self._engine.load())
        is_known = cursor is not None and cursor.boot_id == self.boot_id
        if cursor is None or not is_known or not self._publisher.resume_events(key, reports, cursor.event_id):
            self._publisher.subscribe_events(key, reports, self._engine.snapshot())

    def _generate(
        self,
        kind: RequestKind,
        request_id: str,
        parameters: str,
        tensor: request_parsing.TensorLookup,
    ) -> None:
        key, now_s = next(self._keys), asyncio.get_running_loop().time()
        request = request_parsing.parse_request(kind, key, request_id, parameters, tensor, self._limits, 0)
        options = request_parsing.parse_response_options(tensor)
        place = request_parsing.parse_step_slot(parameters)
        if place is None:
            allowed = "a slot of a step stream: the stub sends step frames only"
            raise EngineError(errors.BAD_VALUE.format(field="step_slot", value="none", allowed=allowed))
        stream = self._streams.find(place.stream)
        progress = SlotProgress(place.slot, options.has_log_probs, options.has_perf)
        slot = SlotStream(key, stream, progress)
        stream.open_slot(place.slot, slot)
        try:
            output = self._engine.begin(request, now_s)
        except EngineError as error:
            output = RequestOutput(error=str(error), is_final=True)
        if not output.is_final:
            self._slots[key] = slot
        slot.send(output)

    def _cancel(self, key: int) -> None:
        if self._engine.cancel(key):
            self._slots.pop(key).send(RequestOutput(is_final=True))


async def serve(
    step_ms: float = 20.0,
    kv_blocks: int = KV_BLOCKS,
    max_sequence_tokens: int = SEQUENCE_TOKENS_MAX,
    salt: str = MODEL_VERSION,
) -> None:
    """Serve until stdin ends."""
    stub = StubEngine(
        EngineSize(kv_blocks, BLOCK_TOKENS, salt),
        step_ms / 1000,
        RequestLimits(VOCABULARY, max_sequence_tokens),
    )
    server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", MESSAGE_BYTES)))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stub, server)

    async def counters() -> dict[str, Any]:
        return {"late_steps": stub.late_steps, "running": stub.running}

    async with control.serving(server) as address:
        steps = asyncio.create_task(stub.run(), name="steps")
        await control.serve_commands(counters, address=address)
        steps.cancel()
    stub.close()


if __name__ == "__main__":
    control.main(serve, __doc__)
