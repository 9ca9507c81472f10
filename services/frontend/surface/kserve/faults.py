"""Refusals of this surface, and their texts. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.errors import MeshError
from services.frontend.surface.kserve.tensors import refused as unread

__all__ = ["DECOUPLED", "NOT_OFFERED", "draining", "named", "stream_full", "unread"]

DECOUPLED: Final = (
    "ModelInfer has one response: a request with stream (or streaming) = true needs ModelStreamInfer, "
    "because the model has a decoupled transaction policy"
)
"""Text of UNIMPLEMENTED for a unary call that asks for a stream."""

NOT_OFFERED: Final = "kvmesh does not offer it: docs/triton.md lists what it serves"
"""Text of UNIMPLEMENTED for a method, behind its name."""

RETRY_AFTER_S: Final = 1.0


def named(error: MeshError) -> MeshError:
    """Return `error` with its reason in the text, because clients of Triton see the text alone."""
    return MeshError(
        error.reason,
        str(error),
        error.metadata,
        error.retry_after_s,
        error.violations,
        error.quota,
        error.trailers,
    )


def stream_full(limit: int) -> MeshError:
    """Return the refusal of a request on a stream with too many."""
    return MeshError(
        "LIVE_REQUESTS_FULL",
        f"{limit} requests of this stream are live; {limit} are allowed",
        {"held": str(limit), "limit": str(limit)},
        retry_after_s=RETRY_AFTER_S,
    )


def draining() -> MeshError:
    """Return the end of a stream without requests, at a frontend that shuts down."""
    return MeshError(
        "DRAINING", "the frontend is shutting down; open a stream at another frontend", retry_after_s=0.1
    )
