"""The response streams of requests and subscriptions: values in, Triton responses out."""

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils  # provided by Triton's Python stub

from engines.contract.outputs import RequestOutput
from engines.contract.request import ResponseOptions

FINAL: Final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_RESPONSE_BYTES = 1024  # per response: the overhead that the server keeps until the request ends


class _CancellationSafeSender:
    """A response sender without a race between the final response and the cancellation poll.

    tritonserver 2.51 frees the request with the final response. A cancellation poll at that moment reads freed memory:
    SIGSEGV in TRITONBACKEND_ResponseFactoryIsCancelled. The lock excludes the race, and no poll follows the final response.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._is_over = False

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._is_over and bool(self._sender.is_cancelled())

    def send(self, *response: Any, flags: int = 0) -> None:
        if not flags:
            self._sender.send(*response)
            return
        with self._lock:
            self._is_over = True
            self._sender.send(*response, flags=flags)


class GenerationStream:
    """The response stream of a request that generates tokens."""

    def __init__(self, sender: Any, response_options: ResponseOptions) -> None:
        self.is_streaming = response_options.is_streaming
        self._sender = _CancellationSafeSender(sender)
        self._options = response_options
        self._cumulative = 0.0

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled."""
        return self._sender.is_cancelled()

    def send(self, output: RequestOutput) -> None:
        flags = FINAL if output.is_final else 0
        if output.error is not None:
            self._sender.send(error_response(output.error), flags=flags)
        elif output.tokens or output.is_complete:
            self._sender.send(pb_utils.InferenceResponse(self._tensors(output)), flags=flags)
        else:
            self._sender.send(flags=flags)

    def _tensors(self, output: RequestOutput) -> list[Any]:
        tensors = [
            _tensor("output_ids", np.array([[output.tokens]], dtype=np.int32)),
            _tensor("sequence_length", np.array([[len(output.tokens)]], dtype=np.int32)),
        ]
        if output.handoff is not None:
            tensors.append(_bytes_tensor("context_phase_params", output.handoff))
        if self._options.has_log_probs:
            self._cumulative += sum(output.log_probs)
            tensors.append(_tensor("output_log_probs", np.array([[output.log_probs]], dtype=np.float32)))
            tensors.append(_tensor("cum_log_probs", np.array([[self._cumulative]], dtype=np.float32)))
        if output.top_ids:
            tensors.append(_tensor("top_log_prob_ids", np.array([output.top_ids], dtype=np.int32)))
            tensors.append(_tensor("top_log_probs", np.array([output.top_log_probs], dtype=np.float32)))
        if self._options.has_perf and output.perf is not None:
            perf = output.perf
            tensors += [
                _count("kv_cache_alloc_new_blocks", perf.alloc_new_blocks),
                _count("kv_cache_reused_blocks", perf.reused_blocks),
                _count("kv_cache_alloc_total_blocks", perf.alloc_total_blocks),
                _time("arrival_time_ns", perf.arrival_ns),
                _time("first_scheduled_time_ns", perf.first_scheduled_ns),
                _time("first_token_time_ns", perf.first_token_ns),
                _time("last_token_time_ns", perf.last_token_ns),
            ]
        return tensors


class SubscriptionStream:
    """The response stream of a subscription: JSON messages in the tensor `output`."""

    is_streaming = True

    def __init__(
        self, sender: Any, output: str, max_bytes: int | None, on_finish: Callable[[], None]
    ) -> None:
        self._sender = _CancellationSafeSender(sender)
        self._output = output
        self._max_bytes = max_bytes
        self._sent_bytes = 0
        self._on_finish = on_finish

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def send(self, payload: bytes) -> None:
        self._sent_bytes += len(payload) + _RESPONSE_BYTES
        self._sender.send(pb_utils.InferenceResponse([_bytes_tensor(self._output, payload)]))

    def is_full(self) -> bool:
        return self._max_bytes is not None and self._sent_bytes > self._max_bytes

    def finish(self, error: str | None) -> None:
        self._on_finish()
        if error is None:
            self._sender.send(flags=FINAL)
        else:
            self._sender.send(error_response(error), flags=FINAL)


class StepFrameSender:
    """The responses of one step-stream request: a frame each, in the tensor `step_frame`."""

    def __init__(self, sender: Any) -> None:
        self._sender = _CancellationSafeSender(sender)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request."""
        return self._sender.is_cancelled()

    def send(self, frame: bytes, *, is_last: bool) -> None:
        """Send one frame."""
        response = pb_utils.InferenceResponse([_bytes_tensor("step_frame", frame)])
        self._sender.send(response, flags=FINAL if is_last else 0)


def answer_empty(sender: Any) -> None:
    """Send a final response without tokens."""
    empty = [
        _tensor("output_ids", np.zeros((1, 1, 0), dtype=np.int32)),
        _tensor("sequence_length", np.zeros((1, 1), dtype=np.int32)),
    ]
    sender.send(pb_utils.InferenceResponse(empty), flags=FINAL)


def error_response(text: str) -> Any:
    """Return a response with an error. The code is INTERNAL, as that of TensorRT-LLM's backend."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL))


def _tensor(name: str, values: npt.NDArray[Any]) -> Any:
    return pb_utils.Tensor(name, values)


def _bytes_tensor(name: str, payload: bytes) -> Any:
    return pb_utils.Tensor(name, np.frombuffer(payload, dtype=np.uint8).reshape(1, -1))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.int32))


def _time(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.int64))
