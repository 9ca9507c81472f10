"""The asynchronous client of the mesh: one stream of tokens per request, with failover between frontends.

See docs/client.md. Imports gRPC, protobuf and the stubs, and no service.
"""

from kvmesh.client.call_state import Chunk
from kvmesh.client.client import Client
from kvmesh.client.connections import RemainingQuota
from kvmesh.client.errors import (
    DeadlinePassed,
    GenerateError,
    MeshFault,
    MeshFull,
    MeshUnavailable,
    ProtocolBroken,
    QuotaExceeded,
    RequestRefused,
    Superseded,
)
from kvmesh.client.generation import GenerationStream, Move
from kvmesh.client.request_builder import build_request
from kvmesh.client.retry_policy import RetryPolicy

__all__ = [
    "Chunk",
    "Client",
    "DeadlinePassed",
    "GenerateError",
    "GenerationStream",
    "MeshFault",
    "MeshFull",
    "MeshUnavailable",
    "Move",
    "ProtocolBroken",
    "QuotaExceeded",
    "RemainingQuota",
    "RequestRefused",
    "RetryPolicy",
    "Superseded",
    "build_request",
]
