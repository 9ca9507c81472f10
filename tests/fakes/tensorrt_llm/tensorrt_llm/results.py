"""executor/result.py@a678b91a: CompletionOutput, GenerationResult and IterationResult."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .disaggregated_params import DisaggregatedParams
from .executor.errors import RequestError
from .queues import ResultQueue
from .sampling_params import SamplingParams
from .surface import Recorded


@dataclass(slots=True)
class Logprob:
    """A log-probability and its rank, from 1."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class Response:
    """The result of one request after an iteration: the executor's Response, as the proxy passes it on."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[dict[int, Logprob]] = ()
    is_final: bool = False
    finish_reason: str | None = None
    context_phase_params: DisaggregatedParams | None = None
    cached_tokens: int = 0
    error: str | Exception | None = None  # text: of this request; an Exception: of the LLM


class CompletionOutput(Recorded):
    """One sequence. `token_ids` and `logprobs` are all so far; the `_diff` properties are those of the last response."""

    __slots__ = (
        "_last_logprobs_len", "_last_token_ids_len", "disaggregated_params", "finish_reason", "index", "logprobs",
        "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.disaggregated_params: DisaggregatedParams | None = None
        self._last_token_ids_len = 0
        self._last_logprobs_len = 0

    @property
    def token_ids_diff(self) -> list[int]:
        """Newly generated token ids."""
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        """Log-probabilities of newly generated tokens."""
        return self.logprobs[self._last_logprobs_len :]


class RequestOutput(Recorded):
    """llm.py@4c05a748: the result of generate_async, iterated in the event loop in which it was made."""

    __slots__ = (
        "_abort",
        "_aborted",
        "_done",
        "_outputs",
        "_sampling",
        "aqueue",
        "cached_tokens",
        "request_id",
    )

    def __init__(self, request_id: int, sampling: SamplingParams, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.cached_tokens = 0
        self.aqueue = ResultQueue(asyncio.get_running_loop())
        self._sampling = sampling
        self._outputs = [CompletionOutput(0)]
        self._done = False
        self._aborted = False
        self._abort = abort

    @property
    def outputs(self) -> list[CompletionOutput]:
        """One sequence: n is 1."""
        return self._outputs[:1]

    @property
    def finished(self) -> bool:
        """Whether the last response was handled."""
        return self._done

    def abort(self) -> None:
        """Ask the worker to end the request; it answers with a last response."""
        self._abort(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        self._handle_response(await self.aqueue.get())
        return self

    def _handle_response(self, response: Response) -> None:
        if isinstance(response.error, Exception):
            raise response.error
        if response.error is not None:
            raise RequestError(response.error)
        self._done = response.is_final
        self.cached_tokens = response.cached_tokens
        output = self._outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(response.token_ids)
        if response.log_probs:
            output._last_logprobs_len = len(output.logprobs)
            output.logprobs += response.log_probs
        if response.context_phase_params is not None:
            output.disaggregated_params = response.context_phase_params
        if self._done:
            output.finish_reason = response.finish_reason
            self._find_stop_reason(output)

    def _find_stop_reason(self, output: CompletionOutput) -> None:
        """A stop token is cut from the output, unless include_stop_str_in_output. The end token stays."""
        stops = self._sampling.stop_token_ids or []
        if output.finish_reason == "stop" and output.token_ids and output.token_ids[-1] in stops:
            output.stop_reason = output.token_ids[-1]
            if not self._sampling.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]


@dataclass(slots=True)
class IterationResult:
    """Statistics or events: an async iterable that ends when nothing comes within its timeout. A singleton of the LLM.

    Items are texts of JSON, parsed when they are read.
    """

    queue: ResultQueue
    timeout: float | None = 2
    is_done: bool = False
    fetched: list[str] = field(default_factory=list)

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        if self.is_done:
            raise StopAsyncIteration
        try:
            return json.loads(await self.queue.get(timeout=self.timeout))
        except TimeoutError:
            self.is_done = True
            raise StopAsyncIteration from None
