"""The impersonated model. Triton loads it through the generated model.py of the model repository."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils  # provided by Triton's Python stub

from engines.contract.errors import EngineError
from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import PerfMetrics, RequestOutput
from engines.contract.request import EngineRequest, RequestKind, RequestLimits, ResponseOptions
from engines.contract.request_parsing import TensorLookup
from engines.contract.response_streams import FINAL, GenerationStream
from engines.contract.triton_model import StartedEngine, TritonModel
from engines.reference import config
from engines.reference.fault_injector import FaultInjector
from engines.reference.handoff import decode
from engines.reference.loading import load_arithmetic
from tests.fakes.stock_backend import request_parsing, settings, texts
from tests.fakes.stock_backend.engine import StockEngine
from tests.fakes.stock_backend.gauges import StockGauges
from tests.fakes.stock_backend.settings import Handoffs

_log = logging.getLogger(__name__)


class TritonPythonModel(TritonModel):
    """See the package."""

    _engine: StockEngine

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine of the settings beside the repository."""
        self._settings = settings.read(args["model_repository"])
        self._names = (args["model_name"], args["model_version"])
        written = json.loads(args["model_config"])
        for name in ("http_address", "server_pid"):
            written["parameters"][name] = {"string_value": str(getattr(self._settings, name))}
        super().initialize({**args, "model_config": json.dumps(written)})
        engine = self._engine
        sizes = (engine.config.block_tokens, engine.config.running_max)
        self._gauges = StockGauges(*self._names, *sizes, lambda: engine.last_iteration)
        self._gauges.start()

    def start_engine(
        self, parameters: dict[str, str], output_queue: OutputQueue, kill_server: Callable[[], None]
    ) -> StartedEngine:
        """See TritonModel."""
        given = config.from_json(self._settings.engine)
        arithmetic, digest = load_arithmetic(given)
        faults = FaultInjector(given.faults, kill_server) if given.faults else None
        engine = StockEngine(given, arithmetic, digest, output_queue, faults)
        engine.start()
        limits = RequestLimits(arithmetic.vocab_size, arithmetic.max_sequence_tokens)
        return StartedEngine(engine, limits, int(parameters["cancellation_check_period_ms"]) / 1000)

    def finalize(self) -> None:
        """See TritonModel."""
        self._gauges.close()
        super().finalize()

    def _take(self, request: Any, sender: Any, arrival_ns: int) -> None:
        def tensor(name: str) -> npt.NDArray[Any] | None:
            found = pb_utils.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        request_id = request.request_id()
        if request_parsing.flag(tensor, "stop"):
            if not request_id:
                raise EngineError(texts.STOP_WITHOUT_ID)
            self._engine.stop(request_id)
            sender.send(flags=FINAL)
            return
        key = next(self._keys)
        kind = request_parsing.kind_of(request.parameters())
        made = request_parsing.parse(
            kind, key, request_id, tensor, self._limits.max_sequence_tokens, arrival_ns
        )
        stream = StockStream(sender, made, tensor, self._engine.config.queue_max)
        if self._is_foreign(made):
            if self._settings.handoffs is Handoffs.HANG:
                self._output_queue.open(key, stream)
                self._engine.hang(key)
                return
            raise EngineError(texts.failed(key, texts.not_in_world()))
        self._output_queue.open(key, stream)
        try:
            self._engine.submit(made)
        except EngineError as error:
            self._output_queue.put([(key, RequestOutput(error=str(error), is_final=True))])

    def _is_foreign(self, request: EngineRequest) -> bool:
        """Return whether the handoff of `request` is from another server, which this one cannot reach."""
        if request.kind is not RequestKind.GENERATION_ONLY or self._settings.handoffs is Handoffs.WORLD:
            return False
        try:
            return decode(request.context_phase_params).boot_id != self._engine.boot_id
        except EngineError:
            return False


class StockStream(GenerationStream):
    """The responses to one request, with the errors and tensors of the stock backend."""

    def __init__(self, sender: Any, request: EngineRequest, tensor: TensorLookup, queue_max: int) -> None:
        flag = request_parsing.flag
        options = ResponseOptions(
            flag(tensor, "streaming"), flag(tensor, "return_perf_metrics"), flag(tensor, "return_log_probs")
        )
        super().__init__(sender, options)
        self._key = request.key
        self._is_context = request.kind is RequestKind.CONTEXT_ONLY
        self._queue_max = queue_max
        self._input_count = len(request.prompt) if flag(tensor, "return_num_input_tokens") else None
        self._counts_output = flag(tensor, "return_num_output_tokens")
        is_excluded = options.is_streaming or flag(tensor, "exclude_input_in_output", default=True)
        self._ahead: list[int] = [] if is_excluded else request.prompt.tolist()
        self._perf: PerfMetrics | None = None

    def send(self, output: RequestOutput) -> None:
        """See ResponseStream."""
        if output.error is not None:
            output.error = self.text_of(output.error)
        elif self._is_context and output.is_complete and output.handoff is None:
            output.error = texts.no_handoff()
        self._perf = output.perf = output.perf or self._perf
        super().send(output)

    def text_of(self, error: str) -> str:
        """Return the stock text for an error of the reference engine."""
        if error.startswith("Maximum queue size"):
            return texts.queue_full(self._queue_max)
        _, _, reason = error.rpartition("due to the following error: ")
        return texts.failed(self._key, texts.in_forward(reason))

    def _tensors(self, output: RequestOutput) -> list[Any]:
        count = len(output.tokens)
        output.tokens, self._ahead = [*self._ahead, *output.tokens], []
        tensors = super()._tensors(output)
        if self._options.has_perf and output.perf is not None:
            tensors.append(_scalar("acceptance_rate", 0.0, np.float32))
            tensors += [
                _scalar(name, 0, np.int32) for name in ("total_accepted_draft_tokens", "total_draft_tokens")
            ]
        if self._input_count is not None:
            tensors.append(_scalar("num_input_tokens", self._input_count, np.int32))
        if self._counts_output:
            tensors.append(_scalar("num_output_tokens", count, np.int32))
        return tensors


def _scalar(name: str, value: float, kind: type[Any]) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=kind))
