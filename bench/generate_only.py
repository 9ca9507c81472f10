"""A servicer of kvmesh.inference.v1 that knows no models, for stand-ins of a frontend."""

from __future__ import annotations

from typing import Any

import grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc


class GenerateOnly(inference_pb2_grpc.InferenceServiceServicer):
    """Subclasses define Generate. The other methods are UNIMPLEMENTED, as those of an older frontend."""

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """Refuse the call."""
        return await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no models")  # type: ignore[no-any-return]

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """Refuse the call."""
        return await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no models")  # type: ignore[no-any-return]
