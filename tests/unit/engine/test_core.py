"""The engine core without threads: random schedules of arrivals, cancellations and steps."""

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from engines.contract import errors
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import Adjustments, RequestKind
from engines.reference.arithmetic import ChunkInput
from engines.reference.cost_model import CostModel, Pacer
from engines.reference.handoff import decode
from engines.reference.sampling import sample_token
from engines.reference.sequence import Sequence
from kvmesh.triton.errors import InvalidRequest, of_text
from tests.unit.engine.driver import ARITHMETIC, CONFIG, Driver, alone, request_of


@pytest.mark.parametrize("seed", range(40))
def test_tokens_do_not_depend_on_batch_chunks_or_cache(seed: int) -> None:
    """Under random arrivals and cancellations every other request gets the output that it gets alone; nothing leaks."""
    rng = random.Random(seed)
    config = replace(CONFIG, kv_blocks=rng.randrange(16, 40), step_tokens_max=rng.randrange(6, 20))
    driver, open_streams, submitted, cancelled = Driver(config), {}, {}, set()
    stems = [np.array([rng.randrange(64) for _ in range(24)], dtype=np.int32) for _ in range(3)]
    for key in range(1, 30):
        own = np.array([rng.randrange(64) for _ in range(rng.randrange(1, 12))], dtype=np.int32)
        prompt = np.concatenate([rng.choice(stems)[: rng.randrange(25)], own])
        kind = RequestKind.CONTEXT_ONLY if rng.random() < 0.2 else RequestKind.CONTEXT_AND_GENERATION
        submitted[key] = request_of(key, prompt, rng.randrange(1, 12), kind)
        sequence = driver.core.submit(submitted[key])
        if sequence is not None:
            open_streams[key] = sequence
        for _ in range(rng.randrange(6)):
            driver.step()
        if rng.random() < 0.3:
            victim: Sequence = rng.choice(list(open_streams.values()))
            if not driver.answers[victim.request.key].is_final:
                cancelled.add(victim.request.key)
            driver.core.cancel(victim)
        for output in list(driver.answers.values()):
            if output.handoff is not None and rng.random() < 0.5:
                driver.core.release_handoff(decode(output.handoff))
    for _ in range(4000):
        driver.step()
        if all(driver.answers[key].is_final for key in submitted):
            break
        for output in list(driver.answers.values()):
            if output.handoff is not None:
                driver.core.release_handoff(decode(output.handoff))
    driver.now_ns += 10**12  # all handoffs expire
    driver.step()
    for key, request in submitted.items():
        output = driver.answers[key]
        assert output.is_final, f"seed={seed} request {key} never ended"
        if key not in cancelled and output.error is None:
            expected = alone(request)
            assert output.tokens == expected, f"seed={seed} request {key}"
    load = driver.core.load()
    assert load.blocks_free == load.blocks_total and load.handoffs_held == 0, f"seed={seed}"
    assert load.sequences_running == load.sequences_waiting == 0, f"seed={seed}"


def test_admission_is_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits for its blocks."""
    driver = Driver(replace(CONFIG, kv_blocks=8))
    big = np.zeros(20, dtype=np.int32)
    first = driver.core.submit(request_of(2, big, 4))
    second = driver.core.submit(request_of(4, big + 1, 4))
    third = driver.core.submit(request_of(6, big[:2] + 2, 2))
    driver.step()
    running = driver.core.scheduler.running
    assert first is not None and second is not None and third is not None
    assert list(running) == [2], (
        "6 of 8 blocks are taken: the second does not fit, the third must wait behind it"
    )


def test_a_request_that_can_never_fit_is_rejected() -> None:
    """The request would otherwise wait for ever."""
    driver = Driver(CONFIG)
    driver.core.submit(request_of(2, np.zeros(100, dtype=np.int32), 4))
    driver.step()
    assert driver.answers[2].error == errors.KV_POOL_TOO_SMALL.format(needed=26, total=24)


def test_a_guide_without_a_token_ends_with_an_error() -> None:
    """Other parameters may forbid all that it allows. No token outside it is drawn, and no other request is harmed."""

    class Only:
        """Allows one token for ever."""

        is_over = False

        def allowed(self) -> npt.NDArray[np.bool_]:
            return np.array([each == 9 for each in range(64)])

        def consume(self, token: int) -> None:
            assert token == 9

    driver = Driver(CONFIG)
    prompt = np.zeros(4, dtype=np.int32)
    for key, least in ((2, 0), (4, 3)):
        wanted = replace(
            request_of(key, prompt, 5),
            guide=GuideText(GuideKind.REGEX, "x"),
            compiled_guide=Only(),
            adjustments=Adjustments(output_tokens_min=least),
            end_ids=frozenset({9}),
        )
        driver.core.submit(wanted)
    driver.core.submit(request_of(6, prompt, 5))
    while driver.step():
        pass
    assert driver.answers[2].tokens == [9]
    assert driver.answers[4].tokens == [] and "guided_decoding_guide" in str(driver.answers[4].error)
    assert len(driver.answers[6].tokens) == 5


def test_a_full_queue_rejects_requests() -> None:
    """The waiting queue is bounded, and a rejection says so."""
    driver = Driver(replace(CONFIG, queue_max=2, running_max=1))
    for key in (2, 4, 6):
        driver.core.submit(request_of(key, np.zeros(4, dtype=np.int32), 2))
    assert [key for key, output in driver.core.outputs] == [6]
    assert driver.core.outputs[0][1].error == errors.QUEUE_FULL.format(limit=2)


def test_a_generated_history_is_reused() -> None:
    """The next turn of a dialogue reuses the blocks of the previous output, not only those of its prompt."""
    driver = Driver(CONFIG)
    prompt = np.arange(8, dtype=np.int32)
    driver.core.submit(request_of(2, prompt, 9))
    while driver.step():
        pass
    turn = np.concatenate([prompt, np.array(driver.answers[2].tokens, dtype=np.int32), prompt])
    driver.core.submit(request_of(4, turn, 1))
    driver.step()
    perf = driver.answers[4].perf
    assert perf is not None and perf.reused_blocks == 4


def test_the_last_prompt_token_is_always_recomputed() -> None:
    """The logits of the last prompt token are needed: a prompt of whole cached blocks reuses all blocks but the last."""
    driver, prompt = Driver(CONFIG), np.arange(12, dtype=np.int32)
    for key in (2, 4):
        driver.core.submit(request_of(key, prompt, 1))
        driver.step()
    perf = driver.answers[4].perf
    assert perf is not None and perf.reused_blocks == 2
    assert (
        driver.core.counters.prefill_tokens_cached == 8 and driver.core.counters.prefill_tokens_computed == 16
    )


def test_draws_are_keyed_by_the_absolute_position_of_the_drawn_token() -> None:
    """The first output token of a prompt of n tokens is drawn at position n; a resumed request continues."""
    driver, prompt = Driver(CONFIG), np.arange(5, dtype=np.int32)
    requests = [request_of(key, prompt, 6) for key in range(1, 21, 2)]
    for one in requests:
        driver.core.submit(one)
    while driver.step():
        pass
    store = ARITHMETIC.new_store(2, 4)
    (row,) = ARITHMETIC.forward([ChunkInput(prompt, 0, np.arange(2, dtype=np.int32), True)], store)
    assert row is not None
    for one in requests:
        assert driver.answers[one.key].tokens[0] == sample_token(row, 5, one.sampling)[0]
    tokens = driver.answers[3].tokens
    resumed = np.concatenate([prompt, np.array(tokens[:2], dtype=np.int32)])
    driver.core.submit(replace(requests[1], key=100, prompt=resumed, output_tokens_max=4))
    while driver.step():
        pass
    assert driver.answers[100].tokens == tokens[2:]


def test_only_missing_blocks_are_pulled() -> None:
    """Blocks in the prefix cache of the decode engine are not transferred again; the partial last block is."""
    prefill, decoder, prompt = Driver(CONFIG), Driver(CONFIG), np.arange(14, dtype=np.int32)
    decoder.core.submit(request_of(2, prompt[:9], 1))
    decoder.step()
    prefill.core.submit(request_of(4, prompt, 4, RequestKind.CONTEXT_ONLY))
    prefill.step()
    blob = prefill.answers[4].handoff
    assert blob is not None
    decoder.core.submit(replace(request_of(6, prompt, 4, RequestKind.GENERATION_ONLY), handoff=decode(blob)))
    decoder.step()
    (pull,) = decoder.core.pulls_to_start
    assert pull.first_block == 2 and len(pull.block_ids) == 2


def test_prefill_cost_does_not_depend_on_chunks() -> None:
    """The quadratic term is a difference of squares, so the costs of chunks add up to the cost of the whole."""
    costs = CostModel(0.0, 0.5, 0.25, 0.125)
    whole = costs.chunk_s(0, 100, is_first=True)
    assert whole == costs.chunk_s(0, 60, is_first=True) + costs.chunk_s(60, 40, is_first=False)


def test_pacer_is_absolute_but_never_makes_up_for_idle_time() -> None:
    """Late wake-ups do not drift, idle time is not made up for, a long stall only in part."""
    schedule = Pacer()
    assert schedule.book(10.0, 1.0, was_idle=True) == 11.0
    assert schedule.book(11.125, 1.0, was_idle=False) == 12.0
    assert schedule.book(20.0, 1.0, was_idle=True) == 21.0
    assert schedule.book(30.0, 1.0, was_idle=False) == 30.75


@pytest.mark.parametrize("after", [0, 3])
def test_fault_injection_starts_after_the_set_number_of_correct_tokens(after: int) -> None:
    """Injected faults: after the correct tokens come ids outside the vocabulary, or an error that the mesh reads as
    invalid.
    """
    request = request_of(1, np.arange(1, 8, dtype=np.int32), 6)
    true = alone(request)
    for lie in ("tokens", "refuse"):
        driver = Driver(replace(CONFIG, lie=lie, lie_after=after))
        driver.core.submit(request)
        while driver.step():
            pass
        answer = driver.answers[1]
        assert answer.is_final and answer.tokens[:after] == true[:after]
        if lie == "tokens":
            assert len(answer.tokens) == 6 and all(token > 64 for token in answer.tokens[after:])
        else:
            assert len(answer.tokens) == after and answer.error is not None
            assert isinstance(of_text(answer.error), InvalidRequest)
