"""The Triton Python-backend model that all engines share: passes requests to the engine and sends its responses.

INVARIANT: `execute` never blocks; it parses tensors, opens a stream and returns. Triton loads the subclass of an engine
through the generated model.py of the model repository.
"""

import itertools
import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils  # provided by Triton's Python stub

from engines.contract import errors, request_parsing
from engines.contract.engine import Engine
from engines.contract.errors import EngineError
from engines.contract.output_queue import CancellationPoller, OutputQueue, ResponseStream
from engines.contract.outputs import RequestOutput
from engines.contract.request import ControlRequest, RequestKind, RequestLimits, ResponseOptions, StepSlot
from engines.contract.response_streams import (
    FINAL,
    GenerationStream,
    StepFrameSender,
    SubscriptionStream,
    answer_empty,
    error_response,
)
from engines.contract.server_watchdog import ServerWatchdog, http_address_of
from engines.contract.step_frames import SlotProgress
from engines.contract.step_streams import SlotStream, StepStreams

_SWITCH_INTERVAL_S = 0.0005  # Python's default of 5 ms would let a step delay the sending thread


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A running engine with the limits of its requests. `cancellation_check_s`: period of the cancellation poll."""

    engine: Engine
    limits: RequestLimits
    cancellation_check_s: float = 0.05


class TritonModel(ABC):
    """The class that Triton's stub calls: initialize once, execute per batch of requests, finalize once."""

    version_folder: Path
    """The folder of the loaded version in the model repository, with the further files of an engine."""

    @abstractmethod
    def start_engine(
        self, parameters: dict[str, str], output_queue: OutputQueue, kill_server: Callable[[], None]
    ) -> StartedEngine:
        """Start the engine described by the model's `parameters`, those of config.pbtxt.

        Its outputs go to `output_queue`. `kill_server` is the death of the whole server, as an injected fault.
        """

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine and the threads of the model."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        # Triton runs them before its services open, so they do not show that a client reaches the server.
        self._warm_ups_left = sum(max(1, int(one.get("count", 1))) for one in config.get("model_warmup", ()))
        self.version_folder = Path(args["model_repository"]) / args["model_version"]
        self._keys = itertools.count(1)
        self._subscriptions: dict[int, SubscriptionStream] = {}
        self._step_streams = StepStreams()
        self._closing = threading.Lock()
        self._is_closed = False
        self._output_queue = OutputQueue()
        self._output_queue.start()
        server_pid = int(parameters.get("server_pid") or os.getppid())
        address = parameters.get("http_address") or http_address_of(server_pid)
        self._watchdog = ServerWatchdog(address, server_pid, self.finalize)
        self._watchdog.start_reaper()
        started = self.start_engine(parameters, self._output_queue, self._watchdog.kill_server)
        self._engine, self._limits = started.engine, started.limits
        self._cancellation_poller = CancellationPoller(self._live, self._cancel, started.cancellation_check_s)
        self._cancellation_poller.start()
        self._watchdog.start()

    def execute(self, requests_: list[Any]) -> None:
        """Start requests; responses go through their response senders."""
        arrival_ns = time.monotonic_ns()
        if self._warm_ups_left > 0:
            self._warm_ups_left -= len(requests_)
        else:
            self._watchdog.record_request()
        for request in requests_:
            sender = request.get_response_sender()
            try:
                self._take(request, sender, arrival_ns)
            except EngineError as error:
                sender.send(error_response(str(error)), flags=FINAL)

    def finalize(self) -> None:
        """Stop the engine; open requests end with an error. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._cancellation_poller.close()
        self._engine.close()
        self._output_queue.close()
        self._step_streams.close()

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
            kind, key, request.request_id(), parameters, tensor, self._limits, arrival_ns
        )
        response_options = request_parsing.parse_response_options(tensor)
        if kind is RequestKind.CONTEXT_ONLY and not response_options.is_streaming:
            response_options = ResponseOptions(
                True, response_options.has_perf, response_options.has_log_probs
            )  # context_only has one response in any case
        slot = request_parsing.parse_step_slot(parameters)
        if slot is None:
            self._output_queue.open(key, GenerationStream(sender, response_options))
        else:
            self._open_slot(key, slot, response_options)
            sender.send(flags=FINAL)  # without a response: the outputs come in step frames
        try:
            self._engine.submit(engine_request)
        except EngineError as error:
            # By its open stream: the cancellation poller may look at the stream now, and must not after its last response.
            self._output_queue.put([(key, RequestOutput(error=str(error), is_final=True))])

    def _open_slot(self, key: int, slot: StepSlot, options: ResponseOptions) -> None:
        """Open the stream of a request by its slot. Raises EngineError."""
        step_stream = self._step_streams.find(slot.stream)
        progress = SlotProgress(slot.slot, options.has_log_probs, options.has_perf)
        stream = SlotStream(key, step_stream, progress, options.is_streaming)
        step_stream.open_slot(slot.slot, stream)
        self._output_queue.open(key, stream)

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
            sender.send(flags=FINAL)
        elif kind is ControlRequest.RELEASE_HANDOFF:
            self._engine.release_handoff(request_parsing.parse_handoff(tensor), lambda: answer_empty(sender))
        elif kind is ControlRequest.STEP_STREAM:
            name = request_parsing.parse_step_stream(parameters)
            self._step_streams.attach(name, StepFrameSender(sender), lambda: next(self._keys))
        elif kind is ControlRequest.STEP_CANCEL:
            step_stream = self._step_streams.find(request_parsing.parse_step_stream(parameters))
            for key in step_stream.cancel(request_parsing.parse_step_slots(parameters)):
                self._engine.cancel(key)
            sender.send(flags=FINAL)
        else:
            cursor, max_bytes = (
                request_parsing.parse_event_cursor(parameters),
                request_parsing.parse_max_bytes(parameters),
            )
            key = next(self._keys)
            stream = SubscriptionStream(sender, kind.value, max_bytes, lambda: self._forget(key))
            self._subscriptions[key] = stream
            if kind is ControlRequest.KV_EVENTS:
                self._engine.subscribe_events(key, stream, cursor)
            else:
                self._engine.subscribe_load(key, stream)

    def _forget(self, key: int) -> None:
        self._subscriptions.pop(key, None)

    def _live(self) -> list[tuple[int, ResponseStream]]:
        # The cancellation poller uses only is_cancelled.
        return [
            *self._output_queue.open_streams(),
            *list(self._subscriptions.items()),  # type: ignore[list-item]
            *self._step_streams.live(),  # type: ignore[list-item]
        ]

    def _cancel(self, key: int) -> None:
        """End a request or a subscription, or all slots of a step stream, after its client has cancelled."""
        slot_keys = self._step_streams.end(key)
        for one in slot_keys or (key,):
            self._engine.cancel(one)
