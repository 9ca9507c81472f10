"""The request of one ModelInferRequest, in terms of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.kserve.tensors import Declared


@dataclass(slots=True)
class Asked:
    """A request of the mesh, and the form of its answer. A translation fills it, input by input."""

    model_name: str = ""
    """As the client wrote it."""
    id: str = ""
    request: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)
    tenant: str | None = None
    deadline_s: float | None = None
    """Seconds from the arrival; None: the request itself has no deadline."""
    wants_empty_final: bool = False
    streams: bool = False
    stops: bool = False
    """True: it ends the requests of its id instead of running one."""
    excludes_prompt: bool = True
    log_probs: bool = False
    input_count: bool = False
    output_count: bool = False
    outputs: frozenset[str] = frozenset()
    """Names of the requested outputs. Empty: all."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens of the model that end an output."""
    tokens_max: int = 0
    """Tokens of the longest context."""
    given: dict[str, Any] = field(default_factory=dict)
    """Values that mean something only together with others, by input."""

    def encode(self) -> bytes:
        """Return the encoded request. Afterwards the prompt is kept only if the answer repeats it."""
        data = self.request.SerializeToString()
        self.given.clear()
        if self.streams or self.excludes_prompt:
            self.request = pb.GenerateRequest()
        return data


Take: TypeAlias = Callable[[Asked, str, Sequence[Any]], None]
"""Puts the values of the input with this name into a request. Raises MeshError."""


class Input(NamedTuple):
    """An input that a model declares."""

    tensor: Declared
    take: Take
    field: str = ""
    """Field of GenerateRequest, as errors of the mesh name it."""
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """A model of TensorRT-LLM as the mesh serves it. `refuses`: further inputs by name, each with the reason."""

    name: str
    inputs: Mapping[str, Input]
    outputs: Sequence[Declared]
    always: frozenset[str]
    """Outputs that must be among the requested ones."""
    refuses: Mapping[str, str]
    finish: Callable[[Asked], None]
    """Completes the request from inputs that belong together. Raises MeshError."""


@dataclass(slots=True)
class Inference:
    """A translated ModelInferRequest. `error`: it cannot be translated; what is known of it is in `asked`."""

    asked: Asked
    data: bytes = b""
    """The encoded GenerateRequest."""
    contract: Contract | None = None
    error: MeshError | None = None
