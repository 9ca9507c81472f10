"""An arithmetic that chooses greedy tokens by itself gives the answers of one that returns logits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.contract.outputs import RequestOutput
from engines.contract.request import Adjustments, RequestKind, SamplingParams
from engines.reference.arithmetic import ChosenToken, ChunkInput
from engines.reference.sampling import sample_token
from engines.reference.sequence import ReferenceRequest
from tests.unit.engine import driver
from tests.unit.engine.driver import ARITHMETIC, CONFIG, Driver


class Choosing:
    """The hashed arithmetic with a ChosenToken wherever it may be."""

    def __init__(self) -> None:
        self.chosen = 0

    def new_store(self, *size: int) -> Any:
        return ARITHMETIC.new_store(*size)

    def forward(self, chunks: list[ChunkInput], store: Any) -> list[Any]:
        rows: list[Any] = ARITHMETIC.forward(chunks, store)
        for at, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            if row is not None and chunk.is_greedy:
                self.chosen += 1
                rows[at] = ChosenToken(*sample_token(row, 0, SamplingParams(log_probs=True)))
        return rows


def _requests(seed: int) -> list[ReferenceRequest]:
    draw = random.Random(seed)
    return [
        ReferenceRequest(
            key,
            f"r{key}",
            RequestKind.CONTEXT_AND_GENERATION,
            np.array([draw.randrange(64) for _ in range(draw.randrange(1, 20))], np.int32),
            draw.randrange(1, 12),
            sampling=SamplingParams(
                temperature=draw.choice((0.0, 0.0, 1.0)),
                seed=key,
                log_probs=draw.random() < 0.5,
                top_log_probs=draw.choice((0, 0, 3)),
            ),
            adjustments=draw.choice((Adjustments(), Adjustments(frequency_penalty=2.0))),
        )
        for key in range(1, 12)
    ]


def _answers(seed: int) -> dict[int, RequestOutput]:
    stepped = Driver(replace(CONFIG, kv_blocks=64))
    for request in _requests(seed):
        stepped.core.submit(request)
    while stepped.step():
        pass
    return dict(stepped.answers)


def test_answers_do_not_depend_on_where_a_token_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probabilities and most likely tokens of mixed batches are the same."""
    choosing = Choosing()
    for seed in range(20):
        wanted = _answers(seed)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "ARITHMETIC", choosing)
            found = _answers(seed)
        for key, answer in wanted.items():
            other = found[key]
            assert (other.tokens, other.log_probs) == (answer.tokens, answer.log_probs), f"{seed=}"
            assert (other.top_ids, other.top_log_probs) == (answer.top_ids, answer.top_log_probs), f"{seed=}"
    assert choosing.chosen > 100
