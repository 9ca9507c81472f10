"""The Triton model that all engines share: what it does between Triton's response sender and the cancellation poller."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.contract.errors import EngineError
from engines.contract.output_queue import REPEAT_S, CancellationPoller, OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.request import RequestLimits
from engines.contract.step_streams import StepStreams
from tests.patience import Patience

FINAL = 1


class Sender:
    """A response sender. After the final response tritonserver has freed the request: a poll would read freed memory."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.polls_too_late = 0

    def send(self, *_response: object, flags: int = 0) -> None:
        if flags == FINAL:
            self.is_over.set()

    def is_cancelled(self) -> bool:
        self.polls_too_late += self.is_over.is_set()
        return False


class Request:
    """One request with a prompt of two tokens."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.tensors = {
            "input_ids": np.array([[1, 2]], np.int32),
            "input_lengths": np.array([[2]], np.int32),
            "request_output_len": np.array([[2]], np.int32),
            "streaming": np.array([[True]]),
        }

    def get_response_sender(self) -> Sender:
        return self._sender

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return "r"


@pytest.fixture
def triton_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module, over a stand-in of the package that Triton's stub provides."""

    class Tensor:
        def __init__(self, values: Any) -> None:
            self._values = values

        def as_numpy(self) -> Any:
            return self._values

    stub: Any = types.ModuleType("triton_python_backend_utils")
    stub.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    stub.InferenceResponse = stub.TritonError = lambda *_values, **_named: None
    stub.TritonError.INTERNAL = 13
    stub.get_input_tensor_by_name = lambda request, name: (
        Tensor(request.tensors[name]) if name in request.tensors else None
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)
    names = ("engines.contract.response_streams", "engines.contract.triton_model")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(names[1])
    for name in names:
        sys.modules.pop(name, None)


def test_no_poll_follows_the_refusal_of_a_request(triton_model: types.ModuleType) -> None:
    """The poller may have taken the stream while the engine still looked at the request."""
    taken: list[Any] = []

    class Model(triton_model.TritonModel):  # type: ignore[misc,name-defined]
        def start_engine(self, *_values: object) -> None:
            """Never called."""

    class Engine:
        def submit(self, _request: object) -> None:
            taken.extend(model._live())
            raise EngineError("refused")

    model = Model()
    queue = OutputQueue()
    queue.start()
    model._keys, model._subscriptions, model._output_queue = itertools.count(1), {}, queue
    model._step_streams = StepStreams()
    model._limits, model._warm_ups_left, model._engine = RequestLimits(100, 100), 0, Engine()
    model._watchdog = types.SimpleNamespace(record_request=lambda: None)
    sender = Sender()
    model.execute([Request(sender)])
    bound = Patience(10.0)
    while not sender.is_over.wait(0.02):
        assert not bound.is_over, "the refusal was not sent"
    ((_, stream),) = taken
    assert not stream.is_cancelled()
    assert sender.polls_too_late == 0
    assert queue.open_streams() == []
    queue.close()


def test_a_cancel_that_came_too_early_is_told_again() -> None:
    """The engine may not have known the request when its stream was opened. It then runs on, until it hears of it."""

    class Cancelled:
        is_streaming = True

        def send(self, output: RequestOutput) -> None:
            """Nothing is sent."""

        def is_cancelled(self) -> bool:
            return True

    told: list[int] = []
    poller = CancellationPoller(lambda: [(7, Cancelled())], told.append, 0.01)
    poller.start()
    bound = Patience(REPEAT_S + 10.0)
    try:
        while len(told) < 2:
            assert not bound.is_over, "told once"
            time.sleep(0.02)
    finally:
        poller.close()
    assert set(told) == {7}
