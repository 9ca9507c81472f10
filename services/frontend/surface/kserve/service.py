"""The servicer of `inference.GRPCInferenceService`. Effects only; the serving path is that of `InferenceService`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc

from kvmesh.call import GrpcCall
from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from services.frontend.surface.kserve import ensemble, metadata
from services.frontend.surface.kserve.faults import DECOUPLED, NOT_OFFERED, named, unread
from services.frontend.surface.kserve.idle_streams import IdleStreams
from services.frontend.surface.kserve.infer_call import InferCall
from services.frontend.surface.kserve.inferences import Inferences
from services.frontend.surface.kserve.protocol import SERVICE_NAME, service_pb2
from services.frontend.surface.kserve.responses import Responses
from services.frontend.surface.kserve.served_models import VERSION, ServedModel, ServedModels
from services.frontend.surface.kserve.statistics import Statistics
from services.frontend.surface.kserve.stream import InferStream
from services.frontend.surface.kserve.stream_call import StreamCall
from services.frontend.surface.kserve.translation import Translation
from services.frontend.surface.service import InferenceService

Context = grpc.aio.ServicerContext[Any, Any]

NOT_SERVED: Final = (
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "SystemSharedMemoryStatus",
    "CudaSharedMemoryStatus",
    "TraceSetting",
    "LogSettings",
)
"""Methods that are UNIMPLEMENTED."""


class KserveService:
    """See the module. `unready_reason()` is empty while the frontend serves."""

    def __init__(
        self,
        service: InferenceService,
        models: ServedModels,
        clock: Clock,
        *,
        message_bytes_max: int,
        unready_reason: Callable[[], str],
    ) -> None:
        self._models = models
        self._listing = service.listing
        self._unready_reason = unready_reason
        self._statistics = Statistics()
        translation = Translation(models, message_bytes_max)
        self._inferences = Inferences(service, translation, self._statistics, clock)
        self._idle = IdleStreams("ModelStreamInfer")
        self._streams: dict[InferStream, None] = {}
        self._is_draining = False

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`. Requests for inferences arrive as bytes, as those of Generate do."""
        messages = service_pb2
        methods: dict[str, Any] = {
            "ModelInfer": grpc.stream_unary_rpc_method_handler(self.ModelInfer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.ModelStreamInfer),
        }
        for method in (
            *(self.ServerLive, self.ServerReady, self.ServerMetadata, self.ModelReady, self.ModelMetadata),
            *(self.ModelConfig, self.ModelStatistics, self.RepositoryIndex),
        ):
            name = method.__name__
            methods[name] = grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=getattr(messages, f"{name}Request").FromString,
                response_serializer=getattr(messages, f"{name}Response").SerializeToString,
            )
        for name in NOT_SERVED:
            methods[name] = grpc.unary_unary_rpc_method_handler(_not_served(name))
        server.add_registered_method_handlers(SERVICE_NAME, methods)  # type: ignore[attr-defined]  # stubs lack it

    @property
    def stream_count(self) -> int:
        """Open streams."""
        return len(self._streams)

    def begin_drain(self) -> None:
        """End each stream when it has no request. New ones are refused, request by request."""
        self._is_draining = True
        for stream in list(self._streams):
            stream.drain()

    def end_drain(self) -> None:
        """Keep streams open again. Those that were told to end do so."""
        self._is_draining = False

    # Named by the protocol.

    async def ModelInfer(self, _: object, context: Context) -> bytes:
        """Return the one response of a request that does not stream. Raises MeshError."""
        call = GrpcCall(context)
        try:
            return await self._infer(call, context)
        except MeshError as error:
            raise named(error) from None

    async def _infer(self, call: GrpcCall, context: Context) -> bytes:
        arrived_s = self._inferences.clock.now_s()
        inference = await self._inferences.read(call, self._inferences.caller(call))
        if inference.error is None:
            if inference.asked.streams:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, DECOUPLED)
            if inference.asked.stops:
                raise unread("stop", "true", "false: a request is stopped on its stream;")
        is_text = inference.contract is ensemble.CONTRACT
        made: list[bytes] = []

        def take(response: bytes) -> bool:
            made.append(response)
            return True

        async def write(response: bytes) -> None:
            made.append(response)

        responses = Responses(inference.asked, is_text=is_text, wraps=False)
        infer = InferCall(
            call, inference, responses, arrived_s, self._inferences.clock, try_write=take, write=write
        )
        await self._inferences.run(infer, inference)
        call.set_trailers(responses.trailers)
        return b"".join(made)

    async def ModelStreamInfer(self, _: object, context: Context) -> None:
        """Serve a stream of requests. Raises MeshError."""
        try:
            stream = InferStream(StreamCall(context), self._inferences, self._idle)
            self._streams[stream] = None
            try:
                if self._is_draining:
                    stream.drain()
                await stream.run()
            finally:
                del self._streams[stream]
        except MeshError as error:
            raise error if error.message.startswith(error.reason) else named(error) from None

    async def ServerLive(self, _: Any, __: Context) -> Any:
        """Say that the process runs."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any, __: Context) -> Any:
        """Say whether the frontend serves, as its health does."""
        return service_pb2.ServerReadyResponse(ready=not self._unready_reason())

    async def ServerMetadata(self, _: Any, __: Context) -> Any:
        """Return name, version and extensions."""
        return metadata.server()

    async def ModelReady(self, request: Any, context: Context) -> Any:
        """Say whether a request for the model would be placed now. An unknown model is not ready."""
        self._inferences.caller(GrpcCall(context))
        try:
            model = self._models.get(request.name, request.version)
        except MeshError:
            return service_pb2.ModelReadyResponse(ready=False)
        return service_pb2.ModelReadyResponse(ready=not self._not_ready(model))

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        """Return inputs and outputs of a model. Raises MeshError."""
        return metadata.metadata(self._asked(request, context))

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        """Return the configuration of a model. Raises MeshError."""
        return service_pb2.ModelConfigResponse(config=metadata.config(self._asked(request, context)))

    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        """Return the counts of one model, or of all. Raises MeshError."""
        if request.name:
            models = [self._asked(request, context)]
        else:
            self._inferences.caller(GrpcCall(context))
            models = list(self._models)
        return service_pb2.ModelStatisticsResponse(
            model_stats=[self._statistics.message(model.name) for model in models]
        )

    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        """Return all models with their states. Raises MeshError."""
        self._inferences.caller(GrpcCall(context))
        made = service_pb2.RepositoryIndexResponse()
        for model in self._models:
            reason = self._not_ready(model)
            if reason and request.ready:
                continue
            made.models.add(
                name=model.name, version=VERSION, state="UNAVAILABLE" if reason else "READY", reason=reason
            )
        return made

    def _asked(self, request: Any, context: Context) -> ServedModel:
        """Identify the caller, and return the model that it names. Raises MeshError."""
        self._inferences.caller(GrpcCall(context))
        try:
            return self._models.get(request.name, request.version)
        except MeshError as error:
            raise named(error) from None

    def _not_ready(self, model: ServedModel) -> str:
        """Return why `model` is not ready, or an empty text."""
        reason = self._unready_reason()
        if not reason and not self._listing.one(model.mesh_model).model.serving:
            reason = "no engine can take a request of the model"
        return reason


def _not_served(name: str) -> Callable[[Any, Context], Any]:
    async def refuse(_: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name}: {NOT_OFFERED}")

    return refuse
