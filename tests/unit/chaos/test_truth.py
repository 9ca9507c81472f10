"""The truth is what the engine says: the whole matrix stands on that."""

from __future__ import annotations

import dataclasses

import numpy as np

from engines.contract.request import SamplingParams
from tests.chaos.cells import Cell, Run
from tests.chaos.plan import plan_of
from tests.chaos.truth import Truth
from tests.unit.engine.engines import running


def test_the_truth_is_what_an_engine_says() -> None:
    """Greedy and sampled, cut to the top or not, long and short: token by token, all of them beside each other."""
    chosen = {
        (stream.temperature, stream.top_k): dataclasses.replace(stream, max_output_tokens=40)
        for seed in range(1, 4)
        for stream in plan_of(Run(Cell("decode", "kill"), seed)).streams
    }
    assert set(chosen) == {(0.0, 0), (1.0, 0), (0.5, 0), (1.0, 8), (0.5, 8)}
    with running(salt="s", kv_blocks=1024, max_sequence_tokens=4096) as bench:
        answers = {
            stream: bench.submit(
                np.array(stream.prompt, np.int32),
                stream.max_output_tokens,
                sampling=SamplingParams(stream.temperature, stream.top_k, 1.0, stream.seed),
            )
            for stream in chosen.values()
        }
        said = {stream: answer.wait().tokens for stream, answer in answers.items()}
    truth = Truth("s", 4096)
    for stream, tokens in said.items():
        assert truth.tokens(stream) == tokens, stream.number
