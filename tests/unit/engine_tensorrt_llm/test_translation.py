"""Requests as TensorRT-LLM takes them, and its responses as outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.contract.errors import EngineError
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import (
    Adjustments,
    EngineRequest,
    RequestKind,
    RequestLimits,
    Retention,
    RetentionRange,
    SamplingParams,
)
from engines.contract.request_parsing import parse_request
from engines.tensorrt_llm import settings, translation, versions
from engines.tensorrt_llm.answers import Answer
from engines.tensorrt_llm.load import Load
from engines.tensorrt_llm.versions import VersionRefused
from tests.unit.engine_tensorrt_llm.test_handoff import made

AGGREGATED = RequestKind.CONTEXT_AND_GENERATION


def request(kind: RequestKind = AGGREGATED, **changes: Any) -> EngineRequest:
    """Return a request of 40 tokens."""
    return EngineRequest(
        **{
            "key": 1,
            "request_id": "r",
            "kind": kind,
            "prompt": np.arange(40, dtype=np.int32),
            "output_tokens_max": 9,
            **changes,
        }
    )


def test_a_greedy_request_has_no_temperature() -> None:
    """A temperature of 0 would be refused; no end token is one that no token has."""
    assert translation.sampling(request()) == {
        "max_tokens": 9,
        "end_id": -1,
        "pad_id": 0,
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,
        "top_k": 1,
    }


def test_a_sampled_request_has_what_it_names() -> None:
    """Without a cut `top_p` is 1: TensorRT-LLM would take the most likely token. Further end tokens are stop tokens."""
    drawn = SamplingParams(0.5, 0, 0.0, 7, True, 3)
    changes = Adjustments(0.1, 0.2, 1.5, None, 4)
    found = translation.sampling(request(end_ids=frozenset({9, 2}), sampling=drawn, adjustments=changes))
    wanted = {"temperature": 0.5, "seed": 7, "top_p": 1.0, "logprobs": 3, "end_id": 2, "stop_token_ids": [9]}
    wanted |= {"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.5, "min_tokens": 4}
    assert wanted.items() <= found.items() and "top_k" not in found
    assert translation.sampling(request(sampling=SamplingParams(log_probs=True)))["logprobs"] == 1
    cut = translation.sampling(request(sampling=SamplingParams(1.0, 40, 0.9)))
    assert (cut["top_k"], cut["top_p"]) == (40, 0.9)


def test_a_prefill_makes_one_token_and_a_decode_gets_the_handoff() -> None:
    """The state goes back as it came."""
    assert translation.sampling(request(RequestKind.CONTEXT_ONLY))["max_tokens"] == 1
    found = translation.generation_only(made())
    assert (found["request_type"], found["first_gen_tokens"]) == ("generation_only", [7])
    assert found["opaque_state"] == bytes(range(256)) and found["ctx_request_id"] == 2**63


def test_guides_have_the_names_of_the_api() -> None:
    """TensorRT-LLM takes one of four."""
    kinds = {kind: translation.guide(GuideText(kind, "x")) for kind in GuideKind}
    assert kinds == {
        GuideKind.JSON: {"json_object": True},
        GuideKind.JSON_SCHEMA: {"json": "x"},
        GuideKind.REGEX: {"regex": "x"},
        GuideKind.EBNF_GRAMMAR: {"grammar": "x"},
    }


def parsed(**tensors: Any) -> EngineRequest:
    """Parse a request with these tensors."""
    given = {"input_ids": [[1]], "input_lengths": [[1]], "request_output_len": [[4]], **tensors}
    arrays = {name: np.array(value) for name, value in given.items()}
    limits = RequestLimits(100, 100, lora_ids=frozenset({3, 4}))
    return parse_request(AGGREGATED, 1, "r", "", arrays.get, limits, 0)


RANGES = {
    f"retention_token_range_{name}": [values] for name, values in (("starts", [0, 8]), ("ends", [8, -1]))
}
RANGES["retention_token_range_priorities"] = [[100, 0]]


def test_retention_and_adapter_are_read_as_the_stock_model_does() -> None:
    """-1 is an open end and no expiry; without starts nothing is active."""
    found = parsed(lora_task_id=[[4]], retention_token_range_durations_ms=[[-1, 500]], **RANGES)
    ranges = (RetentionRange(0, 8, 100, None), RetentionRange(8, None, 0, 500))
    assert found.retention == Retention(ranges) and found.lora_id == 4
    told = parsed(retention_decode_priority=[[50]], retention_decode_duration_ms=[[9]], **RANGES).retention
    assert told is not None and (told.decode_priority, told.decode_duration_ms) == (50, 9)
    assert parsed(retention_decode_priority=[[50]]).retention is None and parsed().lora_id is None


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"lora_task_id": [[5]]}, "Invalid value for lora_task_id: 5; allowed: 3, 4"),
        ({"retention_token_range_starts": [[0]]}, "tensor retention_token_range_ends is missing"),
        ({**RANGES, "retention_token_range_ends": [[8]]}, "ends: 1 values; allowed: 2, as many as starts"),
        ({**RANGES, "retention_token_range_ends": [[0, -1]]}, "ends: 0; allowed: above its start 0"),
        ({**RANGES, "retention_token_range_priorities": [[101, 0]]}, "priorities: 101; allowed: 0..100"),
        ({**RANGES, "retention_decode_priority": [[-1]]}, "retention_decode_priority: -1"),
    ],
)
def test_bad_retention_and_adapters_are_named(tensors: Any, sentence: str) -> None:
    """One sentence with field, value and range."""
    with pytest.raises(EngineError) as caught:
        parsed(**tensors)
    assert sentence in str(caught.value)


def result(
    tokens: list[int], log_probs: list[Any] | None = None, finished: bool = False, cached: int = 0
) -> Any:
    """Return what TensorRT-LLM returns."""
    output = SimpleNamespace(token_ids_diff=tokens, logprobs_diff=log_probs or [])
    return SimpleNamespace(outputs=[output], finished=finished, cached_tokens=cached)


def test_the_first_output_has_the_reused_blocks() -> None:
    """`cached_tokens` in blocks; later outputs have no metrics."""
    answer = Answer(request(arrival_ns=5), 8, 6)
    first = answer.step(result([1], cached=16), 7)
    assert first.perf is not None and (first.perf.alloc_total_blocks, first.perf.reused_blocks) == (6, 2)
    last = answer.step(result([2, 3], finished=True), 8)
    assert last.perf is None and last.tokens == [2, 3] and last.is_final and last.is_complete


def entry(**values: float) -> dict[int, Any]:
    """Return the log-probabilities of one token."""
    return {int(name[1:]): SimpleNamespace(logprob=value, rank=1) for name, value in values.items()}


def test_log_probabilities_are_those_of_the_new_tokens() -> None:
    """The sampled token's own value, the most likely ones first, missing ones as no token."""
    answer = Answer(request(sampling=SamplingParams(log_probs=True, top_log_probs=3)), 8, 0)
    output = answer.step(result([5], [entry(_5=-3.0, _8=-0.5)]), 0)
    assert (output.log_probs, output.top_ids) == ([-3.0], [[8, 5, -1]])
    assert output.top_log_probs == [[-0.5, -3.0, 0.0]]
    assert answer.step(result([6], [-0.25]), 0).log_probs == [-0.25]


def test_the_first_tokens_of_a_decode_have_the_prefills_log_probabilities() -> None:
    """TensorRT-LLM tells nothing about them."""
    sampling = SamplingParams(log_probs=True, top_log_probs=1)
    answer = Answer(request(RequestKind.GENERATION_ONLY, sampling=sampling), 8, 0, made())
    output = answer.step(result([7, 8], [entry(_8=-0.1)]), 0)
    assert (output.log_probs, output.top_ids) == ([-0.5, -0.1], [[-1], [8]])


def test_load_is_counted_and_taken_from_iterations() -> None:
    """An idle engine has all blocks free, unless a handoff may be held."""
    load = Load("b", 100, 4, transfer_timeout_s=60.0)
    load.add_iteration(
        {"iter": 7, "iterLatencyMS": 20.0, "kvCacheStats": {"maxNumBlocks": 90, "freeNumBlocks": 30}}
    )
    load.open_requests = 6
    report = load.report(5, 0.0)
    assert (report.blocks_total, report.blocks_free, report.blocks_cached) == (90, 30, 5)
    assert (report.sequences_running, report.sequences_waiting, report.steps_total) == (4, 2, 7)
    load.open_requests = 0
    assert load.report(5, 0.0).blocks_free == 90
    load.add_handoff(10.0)
    assert (load.report(5, 69.9).blocks_free, load.report(5, 70.0).blocks_free) == (30, 90)


def test_versions_that_were_not_read_are_told() -> None:
    """Another minor version may work, another major one is refused with both numbers."""
    assert versions.check("1.2.1") is None and versions.check("1.3.0rc27") is None
    assert "1.9.0 is installed" in str(versions.check("1.9.0"))
    with pytest.raises(VersionRefused, match=r"TensorRT-LLM 0.21.0 is installed: allowed are 1.2 and 1.3"):
        versions.check("0.21.0")


def test_a_step_of_the_settings_names_no_unknown_argument() -> None:
    """All that is filled in is an argument of LLM(...)."""
    given = {
        "model": "m",
        "kv_cache_config": {"max_tokens": 64},
        "cache_transceiver_config": {"backend": "UCX"},
    }
    found = settings.complete(given, settings.ModelFacts("m", 10, 10, "d"))
    assert settings.split(dict(found.llm))[0] == dict(found.llm)
