"""Triton's /metrics: values, hostile pages, and the load of an engine that does not report it."""

from __future__ import annotations

import random

import pytest

from kvmesh.triton.port import EngineLoad
from kvmesh.triton.server_metrics import (
    LINES_MAX,
    PAGE_BYTES_MAX,
    SAMPLES_MAX,
    ServerMetrics,
    measured_load,
    read_metrics,
)

PAGE = b"""# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 64
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 8
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 96
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 1.28e2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="2"} 999
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="other",version="1"} 777
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 93
nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 2
nv_cpu_utilization 0.5
"""
TOLD = ServerMetrics(128, 64, blocks_free=96, running=5, waiting=3, pending=2, iterations=93)


def test_a_page_tells_cache_and_load_of_one_model() -> None:
    """Other models, other versions and other families are skipped."""
    assert read_metrics(PAGE, "tensorrt_llm") == TOLD
    assert read_metrics(PAGE, "other") == ServerMetrics(blocks_total=777)
    assert read_metrics(b"", "tensorrt_llm") == ServerMetrics()
    without = PAGE.replace(b'request_type="scheduled"', b'request_type="unknown"')
    assert read_metrics(without, "tensorrt_llm").running == 5  # active less waiting


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"1e300", b"x", b"", b"9" * 100])
def test_bad_numbers_are_skipped(value: bytes) -> None:
    """As if the line were missing."""
    page = PAGE.replace(b" 96\n", b" " + value + b"\n")
    assert read_metrics(page, "tensorrt_llm").blocks_free is None


def test_any_bytes_are_a_page() -> None:
    """Cut, repeated and changed pages raise nothing."""
    rng = random.Random(4)
    for _ in range(300):
        page = bytearray(PAGE * rng.randint(1, 3))
        for _ in range(rng.randint(0, 60)):
            page[rng.randrange(len(page))] = rng.randrange(256)
        found = read_metrics(bytes(page[: rng.randrange(len(page))]), "tensorrt_llm")
        load = measured_load(found, None, 0)
        assert load is None or 0 <= load.blocks_free <= load.blocks_total


def test_the_work_for_a_page_is_bounded() -> None:
    """So many lines are looked at, so many are parsed, and each place of a label is looked at once."""
    assert PAGE_BYTES_MAX <= 1 << 20
    assert read_metrics(b"\n" * (LINES_MAX - PAGE.count(b"\n")) + PAGE, "tensorrt_llm") == TOLD
    assert read_metrics(b"\n" * LINES_MAX + PAGE.split(b"\n", 2)[2], "tensorrt_llm") == ServerMetrics()
    line = b'nv_trt_llm_request_metrics{model="tensorrt_llm"} 1\n'
    assert read_metrics(line * SAMPLES_MAX + PAGE, "tensorrt_llm") == ServerMetrics()
    other = line.replace(b"tensorrt_llm", b"other")
    assert read_metrics(other * SAMPLES_MAX + PAGE, "tensorrt_llm") == TOLD
    # A label that began in the middle of a word would make the search quadratic.
    inside = b'nv_trt_llm_kv_cache_block_metrics{%smodel="tensorrt_llm",kv_cache_block_type="max"} 7\n'
    assert read_metrics(inside % b"", "tensorrt_llm").blocks_total == 7
    for word in (b"a-", b"a" * 900 + b"-", b"a" * 100):
        assert not read_metrics(inside % word, "tensorrt_llm").blocks_total


def test_the_load_of_an_idle_engine_is_not_its_last_iteration() -> None:
    """TensorRT-LLM keeps its last values. Without a call and without a new iteration nothing runs."""
    busy = EngineLoad("", 128, 96, sequences_running=5, sequences_waiting=5)
    assert measured_load(TOLD, None, 0) == busy
    assert measured_load(TOLD, TOLD, 1) == busy
    later = ServerMetrics(128, 64, blocks_free=96, running=5, waiting=3, pending=2, iterations=94)
    assert measured_load(later, TOLD, 0) == busy
    assert measured_load(TOLD, TOLD, 0) == EngineLoad("", 128, 128, sequences_waiting=2)
    assert measured_load(ServerMetrics(pending=4), None, 0) is None
