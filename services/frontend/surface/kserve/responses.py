"""The responses of one inference, from the messages of its answer. Pure.

A streamed answer has a response for each message with tokens, and a last one. Any other answer has one response.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.output import BareTokens
from services.frontend.surface.answer import Message
from services.frontend.surface.kserve import encoding, ensemble, tensorrt_llm
from services.frontend.surface.kserve.asked import Asked
from services.frontend.surface.kserve.parameters import FINAL
from services.frontend.surface.kserve.served_models import VERSION
from services.frontend.surface.kserve.tensors import FP32, INT32

CANCELLED: Final = "cancelled"
"""Finish reason of a request that a request with `stop` ended."""

_NOT_LAST: Final = encoding.parameter(FINAL, False)
_LAST: Final = encoding.parameter(FINAL, True)
_TEXT: Final = encoding.text_tensor(ensemble.TEXT_OUTPUT)
_FINISH_REASONS: Final = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in pb.FinishReason.items()
}


class Responses:
    """See the module. `is_text`: the model is the ensemble. `wraps`: they go on a stream."""

    __slots__ = (
        "_asked",
        "_extras",
        "_has_text",
        "_head",
        "_ids",
        "_is_plain",
        "_log_probs",
        "_prefix",
        "_started",
        "_sum",
        "_text",
        "_wraps",
        "trailers",
    )

    def __init__(self, asked: Asked, *, is_text: bool, wraps: bool) -> None:
        self._asked = asked
        self._has_text = is_text
        self._wraps = wraps
        self._head = encoding.head(asked.model_name, VERSION, asked.id)
        self._prefix = self._head + _NOT_LAST
        self._is_plain = not (asked.log_probs or asked.input_count or asked.output_count)
        """True if a response has the outputs that every response has, and no others."""
        if self._is_plain and is_text:
            self._prefix += _TEXT
        self._started = pb.Started()
        self._text: list[str] = []
        self._ids = array("i")
        self._log_probs = array("f")
        self._sum = 0.0
        self.trailers: Mapping[str, str] = {}
        """Remaining budget of the caller, sent with the last response."""

    def take(self, message: Message) -> bytes | None:
        """Return the response for `message`, encoded; None: it needs none yet."""
        if isinstance(message, BareTokens):
            if not self._asked.streams:
                self._text.append(message.text)
                self._ids.extend(message.ids)
                self._log_probs.extend(message.logprobs)
                return None
            if self._is_plain and self._has_text:
                return self._sent(self._prefix + encoding.raw_text(message.text.encode()))
            if self._is_plain:
                return self._sent(self._prefix + _of_ids(array("i", message.ids)))
            return self._sent(self._prefix + self._outputs(message.text, message.ids, message.logprobs))
        if message.HasField("started"):
            self._started.CopyFrom(message.started)
            return None
        return self._last(_finish_reason(message.finished), message.finished)

    def cancelled(self) -> bytes:
        """Return the last response of a request that its client stopped."""
        return self._last(CANCELLED, pb.Finished())

    def nothing(self) -> bytes:
        """Return the empty last response."""
        return self._sent(self._head + _LAST)

    def refused(self, error: MeshError) -> bytes:
        """Return the response with `error`, for a stream."""
        return refused(self._asked, error)

    def _last(self, reason: str, finished: pb.Finished) -> bytes:
        made = self._head + _LAST + self._facts(reason, finished)
        if self._asked.streams and self._asked.wants_empty_final:
            return self._sent(made)
        if self._asked.streams:
            return self._sent(made + self._outputs("", (), ()))
        text, ids = "".join(self._text), self._ids
        if not self._asked.excludes_prompt:
            text = self._asked.request.text + text
            ids = array("i", self._asked.request.tokens.ids) + ids
        return self._sent(made + self._outputs(text, ids, self._log_probs, generated=len(self._ids)))

    def _facts(self, reason: str, finished: pb.Finished) -> bytes:
        """Return what the mesh knows of an ended request, as parameters."""
        usage, started = finished.usage, self._started
        facts: dict[str, bool | int | str] = {
            "kvmesh_finish_reason": reason,
            "kvmesh_request_id": started.request_id,
            "kvmesh_model_version": started.model_version,
            "kvmesh_seed": started.seed,
            "kvmesh_prompt_token_count": usage.prompt_token_count,
            "kvmesh_cached_token_count": usage.cached_token_count,
            "kvmesh_output_token_count": usage.output_token_count,
            "kvmesh_recomputed_token_count": usage.recomputed_token_count,
        }
        if finished.stop_string:
            facts["kvmesh_stop_string"] = finished.stop_string
        if finished.resumed:
            facts["kvmesh_resumed"] = True
        found = b"".join(encoding.parameter(name, value) for name, value in facts.items())
        return found + _budget(self.trailers)

    def _outputs(
        self, text: str, ids: Sequence[int], log_probs: Sequence[float], generated: int | None = None
    ) -> bytes:
        """Return the requested outputs and their contents. `generated`: ids that are no prompt; None: all."""
        asked, count = self._asked, len(ids)
        packed = array("i", ids)
        made: list[tuple[bytes, bytes]] = []
        if self._has_text:
            made.append((_TEXT, encoding.raw_text(text.encode())))
        else:
            made.append(
                (encoding.tensor(tensorrt_llm.OUTPUT_IDS, INT32, 1, 1, count), encoding.raw(packed.tobytes()))
            )
            made.append(_number(tensorrt_llm.SEQUENCE_LENGTH, count))
        if asked.log_probs:
            sums = array("f", list(accumulate(log_probs, initial=self._sum))[-1:])
            self._sum = sums[0]
            if self._wants("cum_log_probs"):
                made.append((encoding.tensor("cum_log_probs", FP32, 1, 1), encoding.raw(sums.tobytes())))
            if self._wants("output_log_probs"):
                shape = encoding.tensor("output_log_probs", FP32, 1, 1, len(log_probs))
                made.append((shape, encoding.raw(array("f", log_probs).tobytes())))
        if asked.input_count and self._wants("num_input_tokens"):
            made.append(_number("num_input_tokens", self._started.prompt_token_count))
        if asked.output_count and self._wants("num_output_tokens"):
            made.append(_number("num_output_tokens", count if generated is None else generated))
        return b"".join(each for each, _ in made) + b"".join(each for _, each in made)

    def _wants(self, output: str) -> bool:
        return not self._asked.outputs or output in self._asked.outputs

    def _sent(self, response: bytes) -> bytes:
        return encoding.on_stream(response) if self._wraps else response


def refused(asked: Asked, error: MeshError) -> bytes:
    """Return the response of a stream with `error`."""
    made = (
        encoding.head(asked.model_name, "", asked.id)
        + _LAST
        + encoding.parameter("kvmesh_reason", error.reason)
    )
    if error.retry_after_s is not None:
        made += encoding.parameter("retry_after_ms", round(error.retry_after_s * 1000))
    made += _budget(error.trailers)
    return encoding.on_stream(made, str(error))


def _budget(trailers: Mapping[str, str]) -> bytes:
    """Return the trailers of a call as parameters."""
    return b"".join(encoding.parameter(name.replace("-", "_"), value) for name, value in trailers.items())


def _of_ids(ids: array[int]) -> bytes:
    """Return the outputs of `tensorrt_llm`, and their contents."""
    length = encoding.raw(len(ids).to_bytes(4, "little"))
    return _tensors_of_ids(len(ids)) + encoding.raw(ids.tobytes()) + length


@lru_cache(maxsize=64)
def _tensors_of_ids(count: int) -> bytes:
    ids = encoding.tensor(tensorrt_llm.OUTPUT_IDS, INT32, 1, 1, count)
    return ids + encoding.tensor(tensorrt_llm.SEQUENCE_LENGTH, INT32, 1, 1)


def _finish_reason(finished: pb.Finished) -> str:
    return _FINISH_REASONS.get(finished.finish_reason, "unspecified")


def _number(name: str, value: int) -> tuple[bytes, bytes]:
    return encoding.tensor(name, INT32, 1, 1), encoding.raw(array("i", (value,)).tobytes())
