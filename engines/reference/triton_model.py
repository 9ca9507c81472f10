"""The Triton Python-backend model: passes requests to the engine and sends responses from the engine.

INVARIANT: `execute` never blocks; it parses tensors, opens a stream and returns. Triton loads the module through the
generated model.py of the model repository.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils  # provided by Triton's Python stub

from engines.reference import config, errors, request_parsing
from engines.reference.engine import Engine
from engines.reference.errors import EngineError
from engines.reference.fault_injector import FaultInjector
from engines.reference.loading import load_arithmetic, load_guide_compiler
from engines.reference.output_queue import CancellationPoller, OutputQueue, ResponseStream
from engines.reference.request_parsing import ControlRequest, RequestLimits, ResponseOptions
from engines.reference.sequence import RequestKind, RequestOutput
from engines.reference.server_watchdog import ServerWatchdog

_SWITCH_INTERVAL_S = 0.0005  # Python's default of 5 ms would let a step delay the sending thread
_RESPONSE_BYTES = 1024  # per response: the overhead that the server keeps until the request ends
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


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


class _GenerationStream:
    """The response stream of a request that generates tokens."""

    def __init__(self, sender: Any, response_options: ResponseOptions) -> None:
        self.is_streaming = response_options.is_streaming
        self._sender = _CancellationSafeSender(sender)
        self._options = response_options
        self._cumulative = 0.0

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def send(self, output: RequestOutput) -> None:
        flags = _FINAL if output.is_final else 0
        if output.error is not None:
            self._sender.send(_error_response(output.error), flags=flags)
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


class _SubscriptionStream:
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
            self._sender.send(flags=_FINAL)
        else:
            self._sender.send(_error_response(error), flags=_FINAL)


class TritonPythonModel:
    """The class that Triton's stub calls: initialize once, execute per batch of requests, finalize once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine described by the model's `engine` parameter (JSON of EngineConfig)."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        parameters = json.loads(args["model_config"])["parameters"]
        settings = config.from_json(parameters["engine"]["string_value"])
        arithmetic, digest = load_arithmetic(settings)
        self._request_limits = RequestLimits(
            arithmetic.vocab_size, arithmetic.max_sequence_tokens, settings.has_guides
        )
        self._keys = itertools.count(1)
        self._subscriptions: dict[int, _SubscriptionStream] = {}
        self._output_queue = OutputQueue()
        self._output_queue.start()
        server_pid = int(parameters["server_pid"]["string_value"])
        self._watchdog = ServerWatchdog(parameters["http_address"]["string_value"], server_pid, self.finalize)
        faults = FaultInjector(settings.faults, self._watchdog.kill_server) if settings.faults else None
        self._compile_guide = load_guide_compiler(settings)
        self._engine = Engine(settings, arithmetic, digest, self._output_queue, faults, self._compile_guide)
        self._engine.start()
        self._cancellation_poller = CancellationPoller(
            self._live, self._engine.cancel, settings.cancellation_check_s
        )
        self._cancellation_poller.start()
        self._closing = threading.Lock()
        self._is_closed = False
        self._watchdog.start()

    def execute(self, requests_: list[Any]) -> None:
        """Start requests; responses go through their response senders."""
        arrival_ns = time.monotonic_ns()
        self._watchdog.record_request()
        for request in requests_:
            sender = request.get_response_sender()
            try:
                self._take(request, sender, arrival_ns)
            except EngineError as error:
                sender.send(_error_response(str(error)), flags=_FINAL)

    def finalize(self) -> None:
        """Stop the engine; open requests end with an error. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._cancellation_poller.close()
        self._engine.close()
        self._output_queue.close()

    def _take(self, request: Any, sender: Any, arrival_ns: int) -> None:
        def tensor(name: str) -> npt.NDArray[Any] | None:
            found = pb_utils.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        parameters = request.parameters()
        kind = request_parsing.parse_request_kind(parameters, tensor)
        if isinstance(kind, ControlRequest):
            self._serve(kind, request.request_id(), parameters, sender, tensor)
            return
        key = next(self._keys)
        engine_request = request_parsing.parse_request(
            kind, key, request.request_id(), parameters, tensor, self._request_limits, arrival_ns
        )
        if engine_request.guide is not None and self._compile_guide is not None:
            # Refuses a guide that cannot be met before it takes a slot.
            engine_request = replace(engine_request, compiled_guide=self._compile_guide(engine_request.guide))
        response_options = request_parsing.parse_response_options(tensor)
        if kind is RequestKind.CONTEXT_ONLY and not response_options.is_streaming:
            response_options = ResponseOptions(
                True, response_options.has_perf, response_options.has_log_probs
            )  # context_only has one response in any case
        self._output_queue.open(key, _GenerationStream(sender, response_options))
        self._engine.submit(engine_request)

    def _serve(
        self,
        kind: ControlRequest,
        request_id: str,
        parameters: str,
        sender: Any,
        tensor: request_parsing.TensorLookup,
    ) -> None:
        if kind is ControlRequest.STOP:
            if not request_id:
                raise EngineError(errors.STOP_WITHOUT_ID)
            self._engine.stop(request_id)
            sender.send(flags=_FINAL)
        elif kind is ControlRequest.RELEASE_HANDOFF:
            self._engine.release_handoff(request_parsing.parse_handoff(tensor), lambda: _answer_empty(sender))
        else:
            cursor, max_bytes = (
                request_parsing.parse_event_cursor(parameters),
                request_parsing.parse_max_bytes(parameters),
            )
            key = next(self._keys)
            stream = _SubscriptionStream(sender, kind.value, max_bytes, lambda: self._forget(key))
            self._subscriptions[key] = stream
            if kind is ControlRequest.KV_EVENTS:
                self._engine.subscribe_events(key, stream, cursor)
            else:
                self._engine.subscribe_load(key, stream)

    def _forget(self, key: int) -> None:
        self._subscriptions.pop(key, None)

    def _live(self) -> list[tuple[int, ResponseStream]]:
        # The cancellation poller uses only is_cancelled.
        return [*self._output_queue.open_streams(), *list(self._subscriptions.items())]  # type: ignore[list-item]


def _answer_empty(sender: Any) -> None:
    empty = [
        _tensor("output_ids", np.zeros((1, 1, 0), dtype=np.int32)),
        _tensor("sequence_length", np.zeros((1, 1), dtype=np.int32)),
    ]
    sender.send(pb_utils.InferenceResponse(empty), flags=_FINAL)


def _error_response(text: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL))


def _tensor(name: str, values: npt.NDArray[Any]) -> Any:
    return pb_utils.Tensor(name, values)


def _bytes_tensor(name: str, payload: bytes) -> Any:
    return pb_utils.Tensor(name, np.frombuffer(payload, dtype=np.uint8).reshape(1, -1))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.int32))


def _time(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=np.int64))
