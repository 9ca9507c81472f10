"""Whole engines in one process: KV transfer over real sockets, cancellation, expiry."""

import numpy as np
import numpy.typing as npt
import pytest

from engines.contract.request import RequestKind, SamplingParams
from engines.reference.sampling import NO_TOKEN
from tests.unit.engine.engines import CONFIG, running, wait_until


def _prompt(seed: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 4096, length, dtype=np.int32)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
def test_disaggregated_equals_aggregated_equals_no_reuse(length: int) -> None:
    """The tokens do not depend on the engine of the prefill, nor on a warm prefix cache."""
    sampling = SamplingParams(0.9, top_p=0.95, seed=7, log_probs=True, top_log_probs=2)
    prompt = _prompt(length, length)
    with running(prefix_reuse=False) as oracle, running() as prefill, running() as generate:
        expected = oracle.run(prompt, 12, sampling=sampling)
        for _ in range(2):
            first = prefill.run(prompt, 12, RequestKind.CONTEXT_ONLY, sampling=sampling)
            assert first.tokens == expected.tokens[:1] and first.handoff is not None
            answer = generate.run(
                prompt, 12, RequestKind.GENERATION_ONLY, handoff=first.handoff, sampling=sampling
            )
            assert answer.tokens == expected.tokens and answer.log_probs == expected.log_probs
            # The alternatives of the first token come with the prefill's answer, and those of the others at their tokens.
            assert answer.top_ids == [[NO_TOKEN] * 2, *expected.top_ids[1:]]
            assert first.top_ids == expected.top_ids[:1] and len(answer.top_log_probs) == len(answer.tokens)
        assert answer.perf is not None and answer.perf.reused_blocks == length // CONFIG.block_tokens
        assert prefill.run(prompt, 12, sampling=sampling).tokens == expected.tokens
        wait_until(lambda: prefill.is_empty() and generate.is_empty(), "all blocks back on both sides")


def test_a_handoff_works_once() -> None:
    """After the acknowledgement the blocks are freed, and a second pull gets an error that says so."""
    with running() as prefill, running() as generate:
        blob = prefill.run(_prompt(1, 40), 4, RequestKind.CONTEXT_ONLY).handoff
        assert generate.run(_prompt(1, 40), 4, RequestKind.GENERATION_ONLY, handoff=blob).error is None
        wait_until(prefill.is_empty, "blocks released after the acknowledgement")
        error = generate.run(_prompt(1, 40), 4, RequestKind.GENERATION_ONLY, handoff=blob).error
        assert error is not None and "is unknown or expired at" in error
        wait_until(generate.is_empty, "nothing leaked by the failure")


def test_release_and_timeout_end_a_handoff() -> None:
    """Held blocks are freed by a release or by the timeout."""
    with running(handoff_timeout_s=0.2) as prefill:
        prefill.run(_prompt(1, 40), 4, RequestKind.CONTEXT_ONLY)
        assert prefill.engine.core.load().handoff_blocks == 5
        wait_until(prefill.is_empty, "expired")
    with running() as prefill:
        blob = prefill.run(_prompt(1, 40), 4, RequestKind.CONTEXT_ONLY).handoff
        assert blob is not None
        for _ in range(2):
            prefill.engine.release_handoff(blob, lambda: None)
        wait_until(prefill.is_empty, "released")


def test_an_unregistered_source_is_rejected_before_dialing() -> None:
    """KV is pulled only from the address that the request allows, for any address in the handoff."""
    with running() as prefill, running() as generate:
        blob = prefill.run(_prompt(1, 40), 4, RequestKind.CONTEXT_ONLY).handoff
        error = generate.run(
            _prompt(1, 40), 4, RequestKind.GENERATION_ONLY, handoff=blob, kv_peer="127.0.0.1:9"
        ).error
        assert error is not None and error.startswith("handoff names a KV source that is not registered")
        assert prefill.engine.core.load().handoffs_held == 1
        peer = prefill.engine.core.address
        assert (
            generate.run(_prompt(1, 40), 4, RequestKind.GENERATION_ONLY, handoff=blob, kv_peer=peer).error
            is None
        )


def test_a_handoff_of_another_model_or_prompt_is_rejected() -> None:
    """KV of other weights or of another history must never be continued."""
    with running() as prefill, running(salt="other") as other, running() as generate:
        blob = prefill.run(_prompt(1, 40), 4, RequestKind.CONTEXT_ONLY).handoff
        for engine, prompt in (
            (other, _prompt(1, 40)),
            (generate, _prompt(2, 40)),
            (generate, _prompt(1, 39)),
        ):
            error = engine.run(prompt, 4, RequestKind.GENERATION_ONLY, handoff=blob).error
            assert error is not None and error.startswith("handoff does not belong to this request")


def test_cancel_in_every_phase_frees_everything() -> None:
    """Queued, prefilling, pulling or decoding: the request ends and its blocks are freed."""
    with running(running_max=2) as prefill, running() as generate:
        answers = [prefill.submit(_prompt(seed, 90), 400) for seed in range(4)]
        blob = generate.run(_prompt(9, 40), 4, RequestKind.CONTEXT_ONLY).handoff
        answers.append(prefill.submit(_prompt(9, 40), 100, RequestKind.GENERATION_ONLY, handoff=blob))
        for answer in answers:
            prefill.engine.cancel(answer.key)
        for answer in answers:
            assert answer.wait().error is None or answer is answers[-1]
        wait_until(prefill.is_empty, "cancelled")


def test_stop_by_request_id() -> None:
    """All open requests with that id end, and no other."""
    with running() as harness:
        stopped = harness.submit(_prompt(1, 8), 400, request_id="a")
        other = harness.submit(_prompt(2, 8), 30, request_id="b")
        harness.engine.stop("a")
        assert len(stopped.wait().tokens) < 400
        assert len(other.wait().tokens) == 30


def test_without_streaming_there_is_one_message() -> None:
    """All tokens come in one message at the end, without the prompt."""
    with running() as harness:
        answer = harness.submit(_prompt(1, 8), 20, is_streaming=False)
        assert len(answer.wait().tokens) == 20 and answer.messages == 1
