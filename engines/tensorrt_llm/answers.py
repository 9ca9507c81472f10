"""Translates what TensorRT-LLM returns for one request into outputs. Pure: its objects in, RequestOutput out.

Read in result.py@a678b91a: `token_ids_diff` and `logprobs_diff` are the news of the last response. `logprobs_diff` has for
each token a dict of token id to Logprob(logprob, rank), or with `logprobs_simple_format` the number alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engines.contract.outputs import PerfMetrics, RequestOutput
from engines.contract.request import EngineRequest, RequestKind
from engines.tensorrt_llm.handoff import Handoff

NO_TOKEN: Final = -1
"""Stands for a most likely token that is not reported."""


@dataclass(slots=True)
class Answer:
    """The state of one answer. `handoff`: that of a generation_only request, whose first tokens the answer repeats."""

    request: EngineRequest
    tokens_per_block: int
    started_ns: int  # when TensorRT-LLM was given the request
    handoff: Handoff | None = None
    tokens_told: int = 0
    cached_tokens: int = 0
    _has_log_probs: bool = field(init=False)
    _count: int = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._count = sampling.top_log_probs
        self._has_log_probs = sampling.log_probs or bool(sampling.top_log_probs)

    def step(self, result: Any, now_ns: int) -> RequestOutput:
        """Return the news of `result`, a RequestOutput of TensorRT-LLM. The last output is final."""
        told = result.outputs[0]
        tokens, is_final = told.token_ids_diff, result.finished
        output = RequestOutput(tokens, is_final=is_final, is_complete=is_final)
        if self._has_log_probs:
            self._add_log_probs(output, told.logprobs_diff)
        if not self.tokens_told and tokens:
            self.cached_tokens = int(result.cached_tokens or 0)
            output.perf = self._perf(now_ns)
        self.tokens_told += len(tokens)
        return output

    def _perf(self, now_ns: int) -> PerfMetrics:
        width, request = self.tokens_per_block, self.request
        total = -(-(len(request.prompt) + 1) // width)
        reused = min(total, self.cached_tokens // width)
        return PerfMetrics(total, reused, request.arrival_ns, self.started_ns, now_ns, now_ns)

    def _add_log_probs(self, output: RequestOutput, entries: Any) -> None:
        """Add the log-probabilities of the output's tokens.

        The first tokens of a decode were sampled by the prefill. Where TensorRT-LLM tells nothing about them, the handoff
        tells their log-probabilities, and no most likely tokens.
        """
        missing = max(0, len(output.tokens) - len(entries))
        known = self.handoff.first_log_probs if self.handoff is not None else []
        for index in range(missing):
            position = self.tokens_told + index
            self._add_row(output, known[position] if position < len(known) else 0.0, ())
        for token, entry in zip(output.tokens[missing:], entries, strict=False):
            if isinstance(entry, Mapping):
                rows = sorted(entry.items(), key=lambda row: (-row[1].logprob, row[0]))
                self._add_row(output, float(entry[token].logprob), rows)
            else:
                self._add_row(output, float(entry), ())

    def _add_row(self, output: RequestOutput, value: float, rows: Any) -> None:
        if self.request.sampling.log_probs:
            output.log_probs.append(value)
        if self._count:
            top = [(token, float(each.logprob)) for token, each in rows[: self._count]]
            top += [(NO_TOKEN, 0.0)] * (self._count - len(top))
            output.top_ids.append([token for token, _ in top])
            output.top_log_probs.append([each for _, each in top])


def first_log_probs(request: EngineRequest, output: RequestOutput) -> list[float]:
    """Return what a handoff carries of the log-probabilities of its first tokens."""
    is_context = request.kind is RequestKind.CONTEXT_ONLY
    return list(output.log_probs) if is_context and request.sampling.log_probs else []
