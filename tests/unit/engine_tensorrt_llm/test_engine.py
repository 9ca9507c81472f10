"""The engine over an LLM API that misbehaves: what ends with a bad answer, and what goes on."""

from __future__ import annotations

import asyncio
import itertools
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.request import EngineRequest, RequestKind
from engines.tensorrt_llm.engine import TensorRtLlmEngine
from engines.tensorrt_llm.settings import Settings
from tests.patience import Patience

SETTINGS = Settings(
    llm={
        "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 800, "event_buffer_max_size": 10},
        "max_batch_size": 4,
        "max_num_tokens": 64,
    },
    model_version="v",
    vocab_size=10,
    max_sequence_tokens=100,
    digest="d",
    warm_up=False,
    loras={},
)
STEPS = 20


class Output:
    """One answer's news."""

    logprobs_diff = ()
    finish_reason = "length"
    disaggregated_params = None

    @property
    def token_ids_diff(self) -> list[int]:
        return [5]


class Result:
    """The result of a request that takes STEPS steps. The answer of a bad one cannot be read."""

    cached_tokens = 0

    def __init__(self, steps: int, *, is_bad: bool) -> None:
        self.finished = False
        self.is_aborted = False
        self.aqueue = types.SimpleNamespace(empty=lambda: True)
        self._steps, self._is_bad = steps, is_bad

    @property
    def outputs(self) -> list[Output]:
        if self._is_bad:
            raise KeyError("a token is missing in the log-probabilities")
        return [Output()]

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Result:
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0.001)
        self._steps -= 1
        self.finished = self._steps <= 0
        return self

    def abort(self) -> None:
        self.is_aborted = self.finished = True


class Stream:
    """Collects the outputs of a request."""

    is_streaming = True

    def __init__(self) -> None:
        self.output = RequestOutput()
        self.is_over = threading.Event()

    def send(self, output: RequestOutput) -> None:
        self.output.merge(output)
        if output.is_final:
            self.is_over.set()

    def is_cancelled(self) -> bool:
        return False

    def wait(self) -> RequestOutput:
        bound = Patience(10.0)
        while not self.is_over.wait(0.01):
            assert not bound.is_over, "no end"
        return self.output


@contextmanager
def running(
    events: Callable[[], list[Mapping[str, Any]]],
) -> Iterator[tuple[TensorRtLlmEngine, OutputQueue, dict[int, Result], list[str]]]:
    """Yield an engine, its queue, the results by key, and the deaths of its server. Request 2 has bad answers."""
    results: dict[int, Result] = {}
    deaths: list[str] = []

    async def told(items: list[Mapping[str, Any]]) -> AsyncIterator[Mapping[str, Any]]:
        for each in items:
            yield each

    def generate(_llm: object, request: EngineRequest, _handoff: object, _loras: object) -> Result:
        results[request.key] = Result(1 if request.key == 0 else STEPS, is_bad=request.key == 2)
        return results[request.key]

    api: Any = types.SimpleNamespace(
        version=lambda: "1.2.1",
        open_llm=lambda _arguments: types.SimpleNamespace(shutdown=lambda: None),
        REFUSALS=(ValueError,),
        REQUEST_ERRORS=(),
        generate=generate,
        iteration_stats=lambda _llm: told([]),
        cache_events=lambda _llm: told(events()),
    )
    queue = OutputQueue()
    queue.start()
    engine = TensorRtLlmEngine(SETTINGS, api, queue, lambda: deaths.append("killed"))
    engine.start()
    try:
        yield engine, queue, results, deaths
    finally:
        engine.close()
        queue.close()


def submitted(engine: TensorRtLlmEngine, queue: OutputQueue, key: int) -> Stream:
    """Submit a request and return its stream."""
    stream = Stream()
    queue.open(key, stream)
    kind = RequestKind.CONTEXT_AND_GENERATION
    engine.submit(EngineRequest(key, str(key), kind, np.zeros(3, np.int32), output_tokens_max=STEPS))
    return stream


def test_an_answer_that_cannot_be_read_ends_its_request_alone() -> None:
    """A bug in the translation must not take the other requests and the server down."""
    with running(list) as (engine, queue, results, deaths):
        streams = [submitted(engine, queue, key) for key in (1, 2, 3)]
        first, bad, last = (stream.wait() for stream in streams)
        assert "KeyError in an answer" in str(bad.error)
        assert results[2].is_aborted
        for good in (first, last):
            assert good.error is None
            assert len(good.tokens) == STEPS
        assert deaths == []


def test_polling_outlives_events_that_cannot_be_read() -> None:
    """Else load reports and lost followers would end with the first one."""
    polls = itertools.count(1)
    reached = threading.Event()

    def broken() -> list[Mapping[str, Any]]:
        number = next(polls)
        if number > 3:
            reached.set()
        return [{"event_id": number, "data": {"type": "stored", "parent_hash": None, "blocks": [{}]}}]

    with running(broken) as (engine, queue, _, deaths):
        assert submitted(engine, queue, 1).wait().error is None
        bound = Patience(10.0)
        while not reached.wait(0.01):
            assert not bound.is_over, "the polls ended"
        assert deaths == []
