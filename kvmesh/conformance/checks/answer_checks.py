"""Checks of streams: responses, deltas, the end of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvmesh.conformance import judgements
from kvmesh.conformance.check import Check, input_need
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.share import OUTPUT_TOKENS
from kvmesh.conformance.tensor_changes import flags
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict, failed, judged, not_judged, not_offered, passed

Fields = Callable[[int], dict[str, Any]]
"""Returns the fields of a call that ends at this token."""

STREAM_TOKENS: Final = 32
STREAMS: Final = 3
"""Attempts to see more than one response: a fast engine may send all tokens at once."""


async def _streaming(trial: Trial) -> Verdict:
    answers = []
    for _ in range(STREAMS):
        answers.append(await trial.engine.ask(trial.prompt(), STREAM_TOKENS))
        if judgements.streams(answers[-1]):
            break
    return judgements.streaming(answers, STREAM_TOKENS)


async def _deltas(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    whole = flags(trial.offer.inputs, streaming=False, exclude_input_in_output=True)
    streamed = [await trial.engine.ask(prompt, OUTPUT_TOKENS) for _ in range(2)]
    wholes = [await trial.engine.ask(prompt, OUTPUT_TOKENS, change=whole) for _ in range(2)]
    return judgements.deltas(prompt, streamed, wholes, trial.offer.vocab_size)


async def _length(trial: Trial) -> Verdict:
    outputs = (1, 2, OUTPUT_TOKENS)
    return judgements.length([(count, await trial.engine.ask(trial.prompt(), count)) for count in outputs])


async def _repeatable(trial: Trial) -> Verdict:
    prompt = trial.long_prompt()
    answers = [await trial.good(prompt, OUTPUT_TOKENS) for _ in range(2)]
    half = OUTPUT_TOKENS // 2
    rest = await trial.good(prompt + answers[0].tokens[:half], OUTPUT_TOKENS - half)
    if answers[0].tokens != answers[1].tokens:
        seen = f"two greedy answers differ: {judgements.difference(*answers)}"
        return not_offered(seen, FALLBACKS["repeatable"])
    if fault := judgements.resumed(answers[0].tokens, half, rest):
        return not_offered(fault, FALLBACKS["repeatable"])
    return passed("two greedy answers agree, and one goes on behind its first half")


async def _ended(trial: Trial, fields: Fields) -> tuple[str, bool]:
    """Return (fault, whether the output has the end token) of an answer that ends by itself.

    `fields`: those of a call that ends at this token.
    """
    prompt = trial.prompt()
    tokens = await trial.greedy(prompt, OUTPUT_TOKENS)
    end, position = judgements.end_token_of(tokens)
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, **fields(end))
    return judgements.ended(tokens, answer, position)


async def _stops(trial: Trial, fields: Fields, why: str) -> Verdict:
    async def once() -> Verdict:
        return judged((await _ended(trial, fields))[0], why)

    return await trial.twice(once)


def _end_id(end: int) -> dict[str, Any]:
    return {"end_token_id": end}


def _word(end: int) -> dict[str, Any]:
    return {"further_end_token_ids": (end,)}


async def _end(trial: Trial) -> Verdict:
    return await _stops(trial, _end_id, "the answer stops at end_id")


async def _end_token(trial: Trial) -> Verdict:
    fault, is_in_output = await _ended(trial, _end_id)
    if fault:
        return not_judged(fault)
    says = trial.offer.parameters.get("end_token", "").lower()
    if says and (says == "true") is not is_in_output:
        return failed(
            f'the parameter end_token is "{says}", but the output {"has" if is_in_output else "lacks"} it'
        )
    if is_in_output:
        return passed("the output has the end token")
    return not_offered("the output lacks the end token", FALLBACKS["end_token"])


async def _stop_words(trial: Trial) -> Verdict:
    return await _stops(trial, _word, "the answer stops at a word of one token")


_STOP_WORDS: Final = input_need("stop_words_list", FALLBACKS["stop_words"])

CHECKS: Final = (
    Check("streaming", "several responses before the end", _streaming),
    Check("streaming", "deltas make up the one answer, without the prompt", _deltas),
    Check("finish", "length", _length),
    Check("finish", "end token", _end),
    Check("end_token", "end token in the output", _end_token),
    Check("finish", "further end tokens", _stop_words, _STOP_WORDS),
    Check("repeatable", "greedy answers, and their second half", _repeatable),
)
