"""A request of the surface, translated: the message for the mesh, and what shapes its answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Asked:
    """See the module."""

    request: pb.GenerateRequest
    streams: bool
    includes_usage: bool
    deadline_s: float | None
    """Seconds from the arrival of the request to its deadline. None: the mesh's default."""
    returns_token_ids: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of this surface for the paths of the protocol, the longest paths first."""


_NAMES = {
    "sampling.guide.json_schema": "response_format.json_schema.schema",
    "sampling.guide": "response_format",
    "sampling.": "",
    "chat.template_arguments_json": "chat_template_kwargs",
    "chat.tools_json": "tools",
    "chat.": "",
    "chat": "messages",
    "tokens.ids": "prompt",
    "text": "prompt",
    "limits.max_output_tokens": "max_tokens",
    "limits.ttft_timeout": "ttft_timeout_ms",
    "limits.": "",
    "options.top_logprobs": "top_logprobs",
    "options.": "",
    "session_id": "user",
    "idempotency_key": "Idempotency-Key",
}
"""Names of the surface by the prefix of a path."""


def name_of(path: str, own: Mapping[str, str]) -> str:
    """Return the name of this surface for the path `path` of kvmesh.inference.v1. `own`: names of this request."""
    for names in (own, _NAMES):
        for prefix, name in names.items():
            if path.startswith(prefix):
                rest = path[len(prefix) :]
                if prefix.endswith(".") or not rest or rest[0] in ".[":
                    return name + rest
    return path


def renamed(error: MeshError, own: Mapping[str, str]) -> MeshError:
    """Return `error` with the names of this surface in its violations, or `error` itself if it has none."""
    if not error.violations:
        return error
    made = invalid(
        error.reason,
        [
            Violation(name_of(each.field, own), each.value, each.allowed, is_clause=each.is_clause)
            for each in error.violations
        ],
    )
    made.metadata = {**error.metadata, **made.metadata}
    made.retry_after_s, made.trailers, made.quota = error.retry_after_s, error.trailers, error.quota
    return made
