"""Injected faults: the text, the draws, and each fault on the engine core."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engines.contract import errors
from engines.contract.request import RequestKind, SamplingParams
from engines.reference import faults
from engines.reference.config import EngineConfig
from engines.reference.faults import NO_FAULTS, Faults
from engines.reference.handoff import decode
from engines.reference.sequence import ReferenceRequest, Sequence
from tests.unit.engine.driver import CONFIG, Driver, alone, request_of

_EACH = (
    Faults(errors=0.5),
    Faults(hang=0.5),
    Faults(hang=1.0),
    Faults(wrong=0.5),
    Faults(miss=1),
    Faults(flip=0.3),
    Faults(errors=0.3, hang=0.3, wrong=0.2, flip=0.2, miss=1, leak_bytes=1, slow=2.0),
)


def _drain(driver: Driver) -> None:
    while driver.step():
        pass


def _request(key: int, output: int = 12) -> ReferenceRequest:
    return request_of(key, np.arange(key, key + 9, dtype=np.int32) % 64, output)


def test_a_text_of_all_faults_is_read() -> None:
    """Each name sets its field; spaces and line ends around items are ignored."""
    text = " errors=0.05, slow=1.3,hang=1,leak_bytes=1000000,wrong=1.0,flip=0.01,die=17-23-99,miss=1,begin_s=30\n"
    assert faults.parse(text) == Faults(0.05, 1.3, 1.0, 1_000_000, 1.0, 0.01, (17, 23, 99), 1, 30.0)
    assert faults.parse("") == faults.parse(" \n") == NO_FAULTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("errors", 'each item must be name=value, got "errors"'),
        ("errors=0.1,", 'each item must be name=value, got ""'),
        (",", 'each item must be name=value, got ""'),
        (
            "error=0.1",
            'unknown name "error"; allowed: errors, slow, hang, leak_bytes, wrong, flip, die, miss, begin_s',
        ),
        ("errors=0.1,errors=0.1", "errors must occur once, got it twice"),
        ("errors=1.1", 'errors must be a number in 0..1, got "1.1"'),
        ("errors=-0.1", 'errors must be a number in 0..1, got "-0.1"'),
        ("errors=nan", 'errors must be a number in 0..1, got "nan"'),
        ("errors=", 'errors must be a number in 0..1, got ""'),
        ("slow=0.9", 'slow must be a number in 1..100, got "0.9"'),
        ("slow=101", 'slow must be a number in 1..100, got "101"'),
        ("hang=2", 'hang must be a number in 0..1, got "2"'),
        ("hang=1e-3", 'hang must be a number in 0..1, got "1e-3"'),
        ("leak_bytes=67108865", 'leak_bytes must be a whole number in 0..67108864, got "67108865"'),
        ("leak_bytes=1.5", 'leak_bytes must be a whole number in 0..67108864, got "1.5"'),
        ("wrong=1_0", 'wrong must be a number in 0..1, got "1_0"'),
        ("flip=1.5", 'flip must be a number in 0..1, got "1.5"'),
        ("miss=2", 'miss must be a whole number in 0..1, got "2"'),
        ("miss=0.5", 'miss must be a whole number in 0..1, got "0.5"'),
        ("begin_s=inf", 'begin_s must be a number in 0..86400, got "inf"'),
        ("begin_s=86401", 'begin_s must be a number in 0..86400, got "86401"'),
        ("die=", 'die must be 1..64 token ids in 0..2147483647 joined by -, got ""'),
        ("die=17-", 'die must be 1..64 token ids in 0..2147483647 joined by -, got "17-"'),
        ("die=2147483648", 'die must be 1..64 token ids in 0..2147483647 joined by -, got "2147483648"'),
        ("die=" + "-".join(["1"] * 65), "die must be 1..64 token ids"),
        ("die=\u0661", "die must be 1..64 token ids"),
        ("@", 'faults must be name=value,... or @PATH with a path, got "@"'),
    ],
)
def test_a_bad_text_is_refused_with_name_value_and_range(text: str, message: str) -> None:
    """The configuration refuses the text, so that the engine does not start."""
    with pytest.raises(ValueError) as caught:
        EngineConfig("hashed", faults=text)
    assert message in str(caught.value)


def test_only_the_hashed_arithmetic_has_faults() -> None:
    """Another arithmetic refuses the option, as a text and as a path."""
    for text in ("errors=0.1", "@/tmp/faults"):
        with pytest.raises(ValueError, match="faults must be empty unless arithmetic is hashed, got"):
            EngineConfig("transformer", faults=text)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_draws_have_their_share_and_repeat(share: float) -> None:
    """Errors and hangs hit the share of requests, independently and equally on each replica."""
    ids = [f"request-{number}" for number in range(4000)]
    one, other = Faults(errors=share, hang=share), Faults(errors=share, hang=share)
    failed = {name for name in ids if one.error_after(name, 100) is not None}
    hung = {name for name in ids if one.hangs(name)}
    for drawn in (failed, hung):
        assert abs(len(drawn) / len(ids) - share) < 0.03
    assert abs(len(failed & hung) / len(ids) - share * share) < 0.03
    assert failed == {name for name in ids if other.error_after(name, 100) is not None}
    at = [one.error_after(name, 100) or 0 for name in failed]
    assert not failed or (min(at) == 0 and max(at) == faults.ERROR_TOKENS_MAX and at.count(0) > 0.3 * len(at))
    assert all(one.error_after(name, 1) in (None, 0) for name in ids[:100])


def test_a_drawn_request_fails_after_its_tokens() -> None:
    """The tokens before the error are right, and a request that is not drawn is not touched."""
    active, driver = Faults(errors=0.5), Driver(CONFIG)
    driver.core.set_faults(active)
    requests = [_request(key) for key in range(1, 17)]
    for one in requests:
        driver.core.submit(one)
    _drain(driver)
    ends = [active.error_after(one.request_id, one.output_tokens_max) for one in requests]
    assert None in ends and 0 in ends and any(ends)
    for one, end in zip(requests, ends, strict=True):
        answer, right = driver.answers[one.key], alone(one)
        assert answer.is_final and answer.tokens == right[:end]
        assert answer.error == (None if end is None else errors.ENGINE_FAULT.format(reason="injected"))


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=5, log_probs=True)]
)
def test_wrong_tokens_are_wrong_everywhere_and_equal_on_all_replicas(sampling: SamplingParams) -> None:
    """Every token differs from the right token of its history; a second replica resumes with the same tokens."""
    request = replace(_request(3), sampling=sampling)
    one, other = Driver(CONFIG), Driver(CONFIG)
    for driver in (one, other):
        driver.core.set_faults(Faults(wrong=1.0))
    one.core.submit(request)
    _drain(one)
    tokens = one.answers[3].tokens
    assert len(tokens) == 12 and all(0 <= token < 64 for token in tokens)
    for position in range(12):
        history = np.concatenate([request.prompt, np.array(tokens[:position], dtype=np.int32)])
        resumed = replace(request, prompt=history, output_tokens_max=12 - position)
        assert alone(resumed)[0] != tokens[position]
        other.core.submit(replace(resumed, key=100 + position))
        _drain(other)
        assert other.answers[100 + position].tokens == tokens[position:]


def test_wrong_tokens_have_their_share_and_leave_special_tokens() -> None:
    """The share counts histories; a special token stays, so that outputs end."""
    rng, active = np.random.default_rng(1), Faults(wrong=0.2)
    histories = [rng.integers(0, 4096, 20, dtype=np.int32) for _ in range(2000)]
    changed = [active.emitted(40, history, 4096) != 40 for history in histories]
    assert abs(sum(changed) / 2000 - 0.2) < 0.04
    assert all(Faults(wrong=1.0).emitted(2, history, 4096) == 2 for history in histories[:50])


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=5, log_probs=True)]
)
def test_flipped_tokens_differ_in_each_boot_and_in_each_run(sampling: SamplingParams) -> None:
    """Equal engines differ at other places than each other, and a second run of a prompt than the first."""
    runs = []
    for boot_id in ("a", "a", "b"):
        driver = Driver(replace(CONFIG, kv_blocks=200))
        driver.core.boot_id = boot_id
        driver.core.set_faults(Faults(flip=0.1))
        for key in (3, 5):
            driver.core.submit(replace(_request(3, 200), key=key, sampling=sampling))
            _drain(driver)
            runs.append(tuple(driver.answers[key].tokens))
    right = alone(replace(_request(3, 12), sampling=sampling))
    assert runs[:2] == runs[2:4], "draws are a function of the boot id"
    assert len(set(runs)) == 4 and all(len(run) == 200 for run in runs)
    assert all(0 <= token < 64 for run in runs for token in run)
    driver = Driver(CONFIG)
    driver.core.set_faults(Faults(flip=1.0))
    driver.core.submit(replace(_request(3, 12), sampling=sampling))
    _drain(driver)
    assert driver.answers[3].tokens[0] != right[0]


def test_flipped_tokens_have_their_share_and_leave_special_tokens() -> None:
    """The share counts tokens of a boot, and neither boots nor places share draws."""
    active = Faults(flip=0.2)
    flipped = {
        boot_id: [active.flipped(40, boot_id, number, 4096) != 40 for number in range(4000)]
        for boot_id in ("a", "b")
    }
    for drawn in flipped.values():
        assert abs(sum(drawn) / 4000 - 0.2) < 0.03
    both = sum(one and other for one, other in zip(*flipped.values(), strict=True))
    assert abs(both / 4000 - 0.04) < 0.015
    assert all(Faults(flip=1.0).flipped(2, "a", number, 4096) == 2 for number in range(50))
    assert all(Faults(flip=1.0).flipped(40, "a", number, 4096) >= 16 for number in range(500))


def test_a_hung_request_gets_nothing_more_until_its_cancel() -> None:
    """A hang stops running, waiting and new requests; the requests that are not drawn go on."""
    driver = Driver(replace(CONFIG, kv_blocks=200, running_max=12))
    active, requests = Faults(hang=0.5), [_request(key) for key in range(1, 11)]
    sequences = {one.key: driver.core.submit(one) for one in requests[:6]}
    driver.step()
    driver.step()
    before = {key: len(driver.answers[key].tokens) for key in sequences}
    sequences |= {one.key: driver.core.submit(one) for one in requests[6:8]}
    driver.core.set_faults(active)
    sequences |= {one.key: driver.core.submit(one) for one in requests[8:]}
    _drain(driver)
    driver.core.set_faults(NO_FAULTS)
    _drain(driver)
    hung = {one.key for one in requests if active.hangs(one.request_id)}
    assert 0 < len(hung) < len(requests)
    for one in requests:
        assert driver.answers[one.key].is_final == (one.key not in hung)
        if one.key in hung:
            assert len(driver.answers[one.key].tokens) == before.get(one.key, 0)
        else:
            assert driver.answers[one.key].tokens == alone(one)
    for key in hung:
        sequence = sequences[key]
        assert sequence is not None
        driver.core.cancel(sequence)
    driver.step()
    load = driver.core.load()
    assert load.blocks_free == load.blocks_total and load.sequences_running == load.sequences_waiting == 0


def test_a_hung_generation_gets_not_even_its_first_token() -> None:
    """After its KV transfer a hung generation_only request stays in the batch, and a cancel frees it."""
    prefill, decoder, prompt = Driver(CONFIG), Driver(CONFIG), np.arange(14, dtype=np.int32)
    prefill.core.submit(request_of(4, prompt, 4, RequestKind.CONTEXT_ONLY))
    prefill.step()
    blob = prefill.answers[4].handoff
    assert blob is not None
    decoder.core.set_faults(Faults(hang=1.0))
    request = replace(request_of(6, prompt, 4, RequestKind.GENERATION_ONLY), handoff=decode(blob))
    sequence = decoder.core.submit(request)
    assert sequence is not None
    decoder.step()
    decoder.core.pulled(sequence, 1)
    assert not decoder.step() and decoder.answers[6].tokens == []
    decoder.core.cancel(sequence)
    decoder.step()
    assert decoder.answers[6].is_final and decoder.core.load().blocks_free == CONFIG.kv_blocks


def test_a_cache_that_misses_recomputes_and_still_registers() -> None:
    """No block is reused while the fault is active; afterwards the registered blocks are hit."""
    driver, prompt = Driver(CONFIG), np.arange(12, dtype=np.int32)
    reused = []
    for key, active in ((2, NO_FAULTS), (4, Faults(miss=1)), (6, NO_FAULTS)):
        driver.core.set_faults(active)
        driver.core.submit(request_of(key, prompt, 3))
        _drain(driver)
        perf = driver.answers[key].perf
        assert perf is not None and driver.answers[key].tokens == driver.answers[2].tokens
        reused.append(perf.reused_blocks)
    assert reused == [0, 0, 2]
    assert driver.core.counters.prefill_tokens_computed == 12 + 12 + 4


def test_faults_begin_after_boot() -> None:
    """Before `begin_s` nothing is injected."""
    active = faults.parse("errors=1,begin_s=30")
    assert active.at(29.9) is NO_FAULTS and active.at(30.0) is active


def _schedule(rng: random.Random) -> Iterator[Faults]:
    while True:
        yield rng.choice((NO_FAULTS, *_EACH))


@pytest.mark.parametrize("seed", range(30))
def test_no_fault_leaks_a_block(seed: int) -> None:
    """Whatever faults come and go, the engine core stays consistent, and after cancels all blocks are free.

    Without wrong tokens each finished request has its right output.
    """
    rng = random.Random(seed)
    config = replace(CONFIG, kv_blocks=rng.randrange(16, 40), step_tokens_max=rng.randrange(6, 20))
    driver, schedule, was_wrong = Driver(config), _schedule(rng), False
    sequences: dict[int, Sequence] = {}
    for key in range(1, 30):
        active = next(schedule)
        was_wrong = was_wrong or active.wrong > 0.0 or active.flip > 0.0
        driver.core.set_faults(active)
        prompt = np.array([rng.randrange(4) for _ in range(rng.randrange(1, 30))], dtype=np.int32)
        kind = RequestKind.CONTEXT_ONLY if rng.random() < 0.2 else RequestKind.CONTEXT_AND_GENERATION
        sequence = driver.core.submit(request_of(key, prompt, rng.randrange(1, 12), kind))
        if sequence is not None:
            sequences[key] = sequence
        for _ in range(rng.randrange(8)):
            driver.step()
        if rng.random() < 0.2:
            driver.core.cancel(rng.choice(list(sequences.values())))
    cancelled = {key for key in sequences if not driver.answers[key].is_final}
    for key in cancelled:
        driver.core.cancel(sequences[key])
    driver.now_ns += 10**12  # all handoffs expire
    driver.step()
    load = driver.core.load()
    assert load.blocks_free == load.blocks_total and load.handoffs_held == 0, f"seed={seed}"
    assert load.sequences_running == load.sequences_waiting == 0, f"seed={seed}"
    assert all(driver.answers[key].is_final for key in range(1, 30)), f"seed={seed}"
    for key, sequence in sequences.items():
        tokens = driver.answers[key].tokens
        assert was_wrong or tokens == alone(sequence.request)[: len(tokens)], f"seed={seed} request {key}"
