"""Checks of bad input: each gets an error, and the engine serves behind it. And the longest sequence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvmesh.conformance import judgements, tensor_changes
from kvmesh.conformance.check import Check, Need, input_need
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Judged, Verdict, judged, not_judged
from kvmesh.triton.port import CallKind

LAST_TOKENS: Final = 4
"""Output tokens of the longest sequence."""

PROMPT_TOKENS_MAX: Final = 1 << 20
"""A longer prompt is not sent."""

Ask = Callable[[Trial], Awaitable[Recording]]


def _bad_input(
    name: str, ask: Ask, fallback: str = "", *, need: Need | None = None, is_hostile: bool = False
) -> Check:
    """Return the check of one bad input. With a fallback the engine may answer it."""

    async def run(trial: Trial) -> Verdict:
        verdict = judgements.refused(await ask(trial), fallback)
        judgements.must(_serves_fault(await trial.engine.ask(trial.prompt(), 2)))
        return verdict

    return Check("errors", name, run, need, is_hostile=is_hostile)


def _serves_fault(answer: Recording) -> str:
    fault = judgements.end_fault(answer)
    return f"behind it the engine serves no more: {fault}" if fault else ""


async def _empty_prompt(trial: Trial) -> Recording:
    change = tensor_changes.chained(
        tensor_changes.replaced("input_ids", "INT32", np.zeros((1, 0), dtype=np.int32)),
        tensor_changes.scalar("input_lengths", 0),
    )
    return await trial.engine.ask(trial.prompt(), 2, change=change)


async def _long_prompt(trial: Trial) -> Recording:
    return await trial.engine.ask(trial.prompts.draw(_limit(trial) + 1), 1)


async def _long_sequence(trial: Trial) -> Recording:
    limit = _limit(trial)
    if not trial.share.sequence_tokens:
        raise Judged(_too_large(limit))
    return await trial.engine.ask(trial.prompts.draw(limit - 1), 2)


async def _outside(trial: Trial) -> Recording:
    return await trial.engine.ask((*trial.prompt(), trial.vocab_size), 2)


async def _no_output(trial: Trial) -> Recording:
    return await trial.engine.ask(trial.prompt(), 0)


async def _bad_words(trial: Trial) -> Recording:
    words = np.array([[trial.prompts.draw(2), (3, 1)]], dtype=np.int32)
    return await trial.engine.ask(
        trial.prompt(), 2, change=tensor_changes.replaced("stop_words_list", "INT32", words)
    )


async def _missing_length(trial: Trial) -> Recording:
    return await trial.engine.ask(trial.prompt(), 2, change=tensor_changes.without("input_lengths"))


async def _unknown_type(trial: Trial) -> Recording:
    return await trial.engine.ask(trial.prompt(), 2, parameters={"request_type": "conformance"})


async def _no_handoff(trial: Trial) -> Recording:
    change = tensor_changes.without("context_phase_params")
    return await trial.engine.ask(trial.prompt(), 2, kind=CallKind.GENERATION_ONLY, change=change)


async def _malformed_handoff(trial: Trial) -> Recording:
    return await trial.engine.ask(
        trial.prompt(), 2, kind=CallKind.GENERATION_ONLY, context_phase_params=b"not a handoff"
    )


async def _longest(trial: Trial) -> Verdict:
    limit = _limit(trial)
    if not trial.share.sequence_tokens:
        return _too_large(limit)
    answer = await trial.engine.ask(trial.prompts.draw(limit - LAST_TOKENS), LAST_TOKENS)
    fault = judgements.end_fault(answer) or judgements.length_fault(answer, LAST_TOKENS)
    return judged(fault, f"a sequence of max_sequence_tokens, {limit}, is served")


def _limit(trial: Trial) -> int:
    limit = trial.offer.max_sequence_tokens
    if not limit:
        raise Judged(not_judged("the model does not tell its longest sequence: give --max-sequence-tokens"))
    if limit >= PROMPT_TOKENS_MAX:
        raise Judged(not_judged(f"max_sequence_tokens is {limit}: no prompt of that length is sent"))
    return limit


def _too_large(limit: int) -> Verdict:
    return not_judged(f"a sequence of {limit} tokens would take too large a share of the engine")


_REFUSED: Final = FALLBACKS["refused"]
_STOP_WORDS: Final = input_need("stop_words_list", FALLBACKS["stop_words"])
_HANDOFF: Final = input_need("context_phase_params", FALLBACKS["disaggregated"])

CHECKS: Final = (
    Check("limits", "the longest sequence", _longest),
    _bad_input("a sequence that is one token too long", _long_sequence, _REFUSED),
    _bad_input("a prompt that is too long", _long_prompt, _REFUSED),
    _bad_input("an empty prompt", _empty_prompt),
    _bad_input("request_output_len of 0", _no_output, _REFUSED),
    _bad_input("a token id outside of the vocabulary", _outside, _REFUSED, is_hostile=True),
    _bad_input("a malformed stop_words_list", _bad_words, FALLBACKS["malformed"], need=_STOP_WORDS),
    _bad_input("a missing input_lengths", _missing_length),
    _bad_input("an unknown request_type", _unknown_type, FALLBACKS["request_type"]),
    _bad_input("generation_only without a handoff", _no_handoff, need=_HANDOFF),
    _bad_input("a malformed handoff", _malformed_handoff, need=_HANDOFF, is_hostile=True),
)
