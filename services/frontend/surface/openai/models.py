"""GET /v1/models and /v1/models/{id}: the models of the mesh in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvmesh.inference.v1 import inference_pb2 as pb


def listing(models: Iterable[pb.Model], created_s: int) -> bytes:
    """Return the list of all models. `created_s`: start of the frontend, in seconds since 1970."""
    data = [_fields(each, created_s) for each in models]
    return msgspec.json.encode({"object": "list", "data": data})


def one(model: pb.Model, created_s: int) -> bytes:
    """Return one model."""
    return msgspec.json.encode(_fields(model, created_s))


def _fields(model: pb.Model, created_s: int) -> dict[str, Any]:
    return {
        "id": model.model,
        "object": "model",
        "created": created_s,
        "owned_by": "kvmesh",
        "root": model.model,
        "parent": None,
        "max_model_len": model.context_token_count,
        "max_output_tokens": model.max_output_tokens,
        "versions": list(model.versions),
        "capabilities": list(model.capabilities),
        "serving": model.serving,
    }
