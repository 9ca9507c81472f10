"""The pure parts: shares, prompts, logs of events, metrics, judgements on the end of a call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engines.contract.kv_events import (
    BlocksRemoved,
    BlocksStored,
    NumberedEvent,
    batch_messages,
    snapshot_messages,
)
from kvmesh.conformance import judgements
from kvmesh.conformance.engine_state import EngineState, Freeing, MetricsPage, Slack, Traffic, freed, sizes_of
from kvmesh.conformance.event_log import EventLog
from kvmesh.conformance.offer import Offer
from kvmesh.conformance.prompts import Prompts
from kvmesh.conformance.recording import Recording, Response
from kvmesh.conformance.share import CALL_TOKENS_MIN, PROMPT_TOKENS, share_of
from kvmesh.conformance.verdict import Outcome
from kvmesh.triton.capabilities import Capabilities
from kvmesh.triton.errors import EngineError, EngineStalled

OFFER = Offer("m", {}, {}, {}, True, 1, Capabilities())


def test_a_share_never_exceeds_an_eighth() -> None:
    """Of any engine: all calls of a check together, unless one call at a time needs more."""
    chance = random.Random(1)
    for _ in range(500):
        offer = replace(
            OFFER,
            tokens_per_block=chance.choice((0, 8, 32, 64, 128)),
            kv_blocks=chance.choice((0, 16, 96, 2048, 60_000)),
            max_sequence_tokens=chance.choice((0, 128, 4096, 131_072)),
            max_sequences=chance.choice((0, 1, 4, 16, 256)),
        )
        share = share_of(offer)
        assert 1 <= share.concurrency <= 4
        assert not offer.max_sequences or share.concurrency <= max(1, offer.max_sequences // 4)
        tokens = offer.kv_blocks * (offer.tokens_per_block or 64) // 8
        if offer.kv_blocks and tokens >= CALL_TOKENS_MIN:
            assert share.concurrency * (PROMPT_TOKENS + share.cancelled_tokens) <= tokens
            assert PROMPT_TOKENS + share.single_tokens <= tokens
            assert share.sequence_tokens <= tokens
        if offer.max_sequence_tokens:
            assert PROMPT_TOKENS + share.single_tokens <= offer.max_sequence_tokens


@pytest.mark.parametrize("vocab_size", [0, 64, 1024, 151_936])
def test_prompts_stay_in_the_vocabulary(vocab_size: int) -> None:
    """They come from the seed, and avoid end tokens and both ends of the vocabulary."""
    avoided = (40, 41, 500)
    prompt = Prompts(7, vocab_size, avoided).draw(5000)
    assert prompt == Prompts(7, vocab_size, avoided).draw(5000) != Prompts(8, vocab_size, avoided).draw(5000)
    assert min(prompt) > 0 and max(prompt) < (vocab_size or 1024) and not set(prompt) & set(avoided)


def _blocks(prompt: tuple[int, ...], width: int) -> tuple[tuple[int, bytes], ...]:
    rows = [prompt[at : at + width] for at in range(0, len(prompt) // width * width, width)]
    return tuple((hash(row), b"".join(t.to_bytes(4, "little") for t in row)) for row in rows)


def _decoded(messages: Any) -> list[dict[str, Any]]:
    import msgspec

    return [msgspec.json.decode(each) for each in messages]


def test_an_event_log_finds_the_blocks_of_a_prompt() -> None:
    """From a snapshot and from events, among others; not behind their removal, nor below another block."""
    prompt, other = tuple(range(100, 118)), tuple(range(200, 218))
    stored = BlocksStored(None, _blocks(prompt, 8))
    for is_snapshot in (True, False):
        log = EventLog()
        events = [] if is_snapshot else [NumberedEvent(5, stored)]
        snapshot = [BlocksStored(None, _blocks(other, 8)), *([stored] if is_snapshot else [])]
        for message in _decoded([*snapshot_messages("b", 4, snapshot), *batch_messages("b", events)]):
            log.add(message)
        assert log.is_complete and not log.fault and not log.chain_fault(prompt, 8)
        assert "block 0" in log.chain_fault(prompt[8:], 8)
        assert "block 1" in log.chain_fault((*prompt[:8], *other[:8]), 8)
        number = 5 if is_snapshot else 6
        removed = BlocksRemoved((stored.blocks[1][0],))
        for message in _decoded(batch_messages("b", [NumberedEvent(number, removed)])):
            log.add(message)
        assert not log.fault and "block 1" in log.chain_fault(prompt, 8)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"boot_id": "c", "events": []}, "the boot id changed from b to c"),
        ({"boot_id": "b", "events": [{"event_id": 6, "data": {}}]}, "event 6 came after event 4"),
        ({"events": []}, "malformed: KeyError"),
        ({"boot_id": "b", "events": [{"event_id": 5, "data": {"type": "stored"}}]}, "malformed: KeyError"),
        ({"boot_id": "b", "snapshot": 7, "event_id": 5}, "malformed: TypeError"),
    ],
)
def test_an_event_log_names_the_first_breach(message: dict[str, Any], fault: str) -> None:
    """And keeps it."""
    log = EventLog()
    log.add({"boot_id": "b", "event_id": 4, "snapshot": [], "more": False})
    log.add(message)
    log.add({"boot_id": "z", "events": []})
    assert fault in log.fault


PAGE = """# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 3
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 500
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="another",version="1"} 77
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 2
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} 41
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="tensorrt_llm",reason="OTHER",version="1"} 1
nv_inference_request_failure{model="another",reason="OTHER",version="1"} 9
"""
"""Names and labels as in TensorRT-LLM's custom_metrics_reporter.cc and Triton's user guide."""


def test_the_metrics_of_a_model_are_read() -> None:
    """Blocks, requests, sizes and the count of ended requests, of this model alone."""
    page = MetricsPage(PAGE, "tensorrt_llm")
    assert page.state() == EngineState(3, 2)
    assert page.requests_total() == 42
    assert sizes_of(page) == {"kv_blocks": 500, "tokens_per_block": 64}
    bare = MetricsPage("", "tensorrt_llm")
    assert bare.state() is None and bare.requests_total() is None and sizes_of(bare) == {}


START, USED = EngineState(10, 0), EngineState(12, 1)
QUIET = Traffic(True, 1, 1)


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (Freeing(START, START, 0.3, True, QUIET), Outcome.PASS),
        (Freeing(START, START, 0.3, True, replace(QUIET, was_quiet=False)), Outcome.NOT_JUDGED),
        (Freeing(START, START, 1.3, True, QUIET), Outcome.FAIL),
        (Freeing(START, USED, 5.0, False, QUIET), Outcome.FAIL),
        (Freeing(START, USED, 5.0, False, replace(QUIET, was_quiet=False)), Outcome.NOT_JUDGED),
        (Freeing(START, USED, 5.0, False, replace(QUIET, most=2)), Outcome.NOT_JUDGED),
        (Freeing(START, USED, 5.0, False, replace(QUIET, counted=9, own=4)), Outcome.NOT_JUDGED),
        (Freeing(START, USED, 5.0, False, replace(QUIET, counted=4, own=4)), Outcome.FAIL),
    ],
)
def test_blocks_of_others_are_no_leak(seen: Freeing, outcome: Outcome) -> None:
    """A fail needs an engine that served nobody else."""
    assert freed("after a cancel", seen, 1.0).outcome is outcome


def test_slack_allows_for_the_look_itself() -> None:
    """With metrics the own call of two tokens may be seen; handoffs have no slack."""
    slack = Slack(blocks=2, requests=1)
    assert slack.is_back(replace(START, blocks_used=12, requests=1), START)
    assert not slack.is_back(replace(START, blocks_used=13), START)
    assert not slack.is_back(replace(START, handoffs=1), START)


def _response(*tokens: int) -> Response:
    return Response(tokens, len(tokens), (), (), None)


def test_the_end_of_a_call() -> None:
    """An error, a missing final flag and responses behind it are faults, each with its sentence."""
    sound = Recording([_response(1, 2)], is_final=True)
    assert judgements.end_fault(sound) == ""
    assert "without a response with triton_final" in judgements.end_fault(replace(sound, is_final=False))
    assert "1 responses came after" in judgements.end_fault(replace(sound, after_final=1))
    assert "EngineError: broken" in judgements.end_fault(replace(sound, error=EngineError("broken")))
    assert "did not end" in judgements.end_fault(replace(sound, error=EngineStalled("20 s")))


def test_an_end_token_lies_before_the_last_tokens() -> None:
    """An engine that ignores it goes on. Its first position counts, also where tokens repeat."""
    chance = random.Random(3)
    for _ in range(200):
        tokens = chance.choices(range(chance.choice((1, 3, 50))), k=16)
        end, position = judgements.end_token_of(tokens)
        assert tokens.index(end) == position < 12


def test_empty_deltas_are_allowed() -> None:
    """TensorRT-LLM may end with one."""
    prompt = (9, 9, 9, 9)
    streamed = Recording([_response(1), _response(), _response(2), _response()], is_final=True)
    whole = Recording([_response(*prompt, 1, 2)], is_final=True)
    verdict = judgements.deltas(prompt, [streamed, streamed], [whole, whole], 0)
    assert verdict.outcome is Outcome.PASS and "4 were empty" in verdict.why
