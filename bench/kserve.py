"""Requests of KServe v2 with the tensors of TensorRT-LLM's models, and the checks of their answers. Pure."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc import service_pb2

from bench import generation
from bench.word_load import Arrive

ENSEMBLE: Final = "ensemble"
TENSORRT_LLM: Final = "tensorrt_llm"
MODELS: Final = (ENSEMBLE, TENSORRT_LLM)
FINAL: Final = "triton_final_response"
TEXT_OUTPUT, OUTPUT_IDS = "text_output", "output_ids"
ID_BYTES: Final = 4
LENGTH_BYTES: Final = 4
"""Bytes before each element of a BYTES tensor, its length."""


def request(model: str, request_id: str, text: str, tokens: int, draw: random.Random) -> Any:
    """Return a streamed request for `tokens` tokens. `model`: ENSEMBLE, or TENSORRT_LLM with an id per word of `text`."""
    asked = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if model == ENSEMBLE:
        data = text.encode()
        _add(asked, "text_input", "BYTES", [1, 1], struct.pack("<I", len(data)) + data)
        _add(asked, "max_tokens", "INT32", [1, 1], struct.pack("<i", tokens))
        _add(asked, "stream", "BOOL", [1, 1], b"\1")
        return asked
    ids = generation.random_ids(len(text.split()), draw)
    _add(asked, "input_ids", "INT32", [1, len(ids)], struct.pack(f"<{len(ids)}i", *ids))
    _add(asked, "input_lengths", "INT32", [1, 1], struct.pack("<i", len(ids)))
    _add(asked, "request_output_len", "INT32", [1, 1], struct.pack("<i", tokens))
    _add(asked, "streaming", "BOOL", [1, 1], b"\1")
    return asked


def token_count(response: Any) -> int:
    """Return the number of tokens of a ModelInferResponse: its ids, or 1 for a text."""
    for tensor, data in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == OUTPUT_IDS:
            return len(data) // ID_BYTES
        if tensor.name == TEXT_OUTPUT:
            return int(len(data) > LENGTH_BYTES)
    return 0


@dataclass(slots=True)
class _Pending:
    """A request without its final response."""

    expected: int
    arrive: Arrive
    end: Callable[[str], None]
    """Takes the error of the ended request; empty: there was none."""
    count: int = 0


class Responses:
    """The requests of one stream, by their ids."""

    def __init__(self) -> None:
        self._ids = map(str, itertools.count(1))
        self._pending: dict[str, _Pending] = {}
        self._ended = ""

    def begin(self, expected: int, arrive: Arrive, end: Callable[[str], None]) -> str:
        """Return the id of a new request for `expected` tokens."""
        request_id = next(self._ids)
        if self._ended:
            end(self._ended)
        else:
            self._pending[request_id] = _Pending(expected, arrive, end)
        return request_id

    def forget(self, request_id: str) -> None:
        """Forget a request; one that has ended is unknown."""
        self._pending.pop(request_id, None)

    def take(self, message: Any) -> None:
        """Take a ModelStreamInferResponse."""
        response = message.infer_response
        pending = self._pending.get(response.id)
        if message.error_message:
            if pending is None:  # an error of the stream
                self.end(message.error_message)
                return
            self.forget(response.id)
            pending.end(message.error_message)
            return
        if pending is None:
            return
        if count := token_count(response):
            pending.count += count
            pending.arrive(count)
        if response.parameters[FINAL].bool_param:
            self.forget(response.id)
            is_whole = pending.count == pending.expected
            pending.end("" if is_whole else f"{pending.count} of {pending.expected} tokens")

    def end(self, error: str) -> None:
        """End all requests, and those to come, with an error: the stream has ended."""
        self._ended = error
        for pending in list(self._pending.values()):
            pending.end(error)
        self._pending.clear()


def _add(asked: Any, name: str, datatype: str, shape: Sequence[int], data: bytes) -> None:
    asked.inputs.add(name=name, datatype=datatype, shape=shape)
    asked.raw_input_contents.append(data)
