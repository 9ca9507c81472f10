"""Checks of sampling: log-probabilities, seeds, penalties, biases, least lengths, guides."""

from __future__ import annotations

from typing import Any, Final

from kvmesh.conformance import judgements
from kvmesh.conformance.check import Check, capability_need, input_need
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.share import OUTPUT_TOKENS
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict, failed, judged, not_judged
from kvmesh.triton.port import GuideKind, SamplingExtras

ALTERNATIVES: Final = 3
SEED: Final = 1234567
OTHER_SEEDS: Final = (1, 2, 3)

BIAS: Final = 200.0
"""Above the difference of any two logits of a model. Steps of bf16 at this size are 1."""

SECOND_BIAS: Final = BIAS - 46.0
"""Logits of two tokens differ by less than the two biases: by up to 38 in hashed arithmetic."""

PENALTY: Final = 2.0
PENALISED_TOKENS: Final = 48
"""With the penalty for each use, the second token wins within these tokens: 2 * 46 > 46 + 38."""

GUIDE: Final = "[0-9]{4}"
GUIDE_TOKENS: Final = 4
"""Most tokens of GUIDE."""


def _extras(prompt: tuple[int, ...], **fields: Any) -> SamplingExtras:
    """Return further parameters of a call whose output begins behind `prompt`."""
    return SamplingExtras(output_start=len(prompt), **fields)


async def _logprobs(trial: Trial) -> Verdict:
    return judgements.logprobs(
        await trial.engine.ask(trial.prompt(), OUTPUT_TOKENS, logprobs=True), OUTPUT_TOKENS
    )


async def _top_logprobs(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    extras = _extras(prompt, alternatives=ALTERNATIVES)
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, logprobs=True, extras=extras)
    return judgements.top_logprobs(answer, ALTERNATIVES)


async def _seeds(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    first, second, *others = [
        await trial.engine.ask(prompt, OUTPUT_TOKENS, temperature=1.0, seed=seed)
        for seed in (SEED, SEED, *OTHER_SEEDS)
    ]
    return judgements.seeds(first, second, others)


async def _seeded_resume(trial: Trial) -> Verdict:
    prompt, half = trial.prompt(), OUTPUT_TOKENS // 2
    whole = await trial.good(prompt, OUTPUT_TOKENS, temperature=1.0, seed=SEED)
    rest = await trial.engine.ask(
        prompt + whole.tokens[:half], OUTPUT_TOKENS - half, temperature=1.0, seed=SEED
    )
    fault = judgements.resumed(whole.tokens, half, rest)
    return judged(
        fault, f"prompt, {half} tokens and the seed go on with the same {OUTPUT_TOKENS - half} tokens"
    )


async def _bias(trial: Trial) -> Verdict:
    _ = trial.vocab_size
    prompt, token = trial.prompt(), trial.prompts.draw(1)[0]
    extras = _extras(prompt, bias=((token, BIAS),))
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, extras=extras)
    return judgements.forced(answer, token, OUTPUT_TOKENS)


async def _penalties(trial: Trial) -> Verdict:
    """Compare two biases with and without a penalty, where biases are offered; else only see that it is taken."""
    prompt, first = trial.prompt(), trial.prompts.draw(1)[0]
    if not trial.offer.capabilities.logit_bias or not trial.offer.vocab_size:
        extras = _extras(prompt, frequency_penalty=PENALTY, presence_penalty=PENALTY, repetition_penalty=2.0)
        answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, extras=extras)
        return judged(judgements.end_fault(answer), "a call with penalties is taken")
    second = trial.prompts.other_than((first,))
    bias = ((first, BIAS), (second, SECOND_BIAS))
    plain, penalised = [
        await trial.engine.ask(
            prompt, PENALISED_TOKENS, extras=_extras(prompt, bias=bias, frequency_penalty=penalty)
        )
        for penalty in (0.0, PENALTY)
    ]
    return judgements.penalised(plain, penalised, second)


async def _min_tokens(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    tokens = await trial.greedy(prompt, OUTPUT_TOKENS)
    position = OUTPUT_TOKENS // 4
    least = position + OUTPUT_TOKENS // 4
    if len(tokens) < least:
        return failed(f"{len(tokens)} tokens came, request_output_len is {OUTPUT_TOKENS}")
    end = tokens[position]
    answer = await trial.engine.ask(
        prompt, OUTPUT_TOKENS, end_token_id=end, extras=_extras(prompt, min_tokens=least)
    )
    return judgements.delayed(tokens, end, tokens.index(end), least, answer)


async def _guided(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    extras = _extras(prompt, guide_kind=GuideKind.REGEX, guide=GUIDE)
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, extras=extras, **_end(trial))
    return judgements.guided(answer, GUIDE_TOKENS, OUTPUT_TOKENS)


async def _json(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    extras = _extras(prompt, guide_kind=GuideKind.JSON)
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, extras=extras, **_end(trial))
    if fault := judgements.end_fault(answer):
        return failed(fault)
    return judged(
        "" if answer.tokens else "the answer is empty", f"{len(answer.tokens)} tokens under the guide"
    )


async def _guided_resume(trial: Trial) -> Verdict:
    prompt = trial.prompt()
    extras = _extras(prompt, guide_kind=GuideKind.JSON)
    whole = await trial.greedy(prompt, OUTPUT_TOKENS, extras=extras, **_end(trial))
    half = len(whole) // 2
    if not half:
        return not_judged("the guided answer has a single token")
    rest = await trial.engine.ask(prompt + whole[:half], OUTPUT_TOKENS - half, extras=extras, **_end(trial))
    fault = judgements.resumed(whole, half, rest)
    return judged(fault, f"goes on behind its first {half} tokens")


def _end(trial: Trial) -> dict[str, Any]:
    """Return the end token, with which some engines end an answer behind its guide."""
    return {"end_token_id": trial.settings.end_ids[0]} if trial.settings.end_ids else {}


_LOGPROBS: Final = capability_need("logprobs", "input return_log_probs with output output_log_probs")
_TOP_LOGPROBS: Final = capability_need("top_logprobs", "input return_top_log_probs with its two outputs")
_SEED: Final = input_need("seed", FALLBACKS["seed"])
_SEEDED_RESUME: Final = capability_need("seeded_resume", 'parameter seeded_resume "true"')
_BIAS: Final = capability_need("logit_bias", "input embedding_bias")
_PENALTIES: Final = capability_need(
    "penalties", "input frequency_penalty, presence_penalty or repetition_penalty"
)
_MIN_TOKENS: Final = capability_need("min_tokens", "input min_tokens")
_GUIDES: Final = capability_need("guided_output", "input guided_decoding_guide_type or guided_decoding_guide")
_GUIDED_RESUME: Final = capability_need("guided_resume", 'guided output with parameter output_start "true"')

CHECKS: Final = (
    Check("logprobs", "one for each token", _logprobs, _LOGPROBS),
    Check("top_logprobs", "the most likely tokens beside each token", _top_logprobs, _TOP_LOGPROBS),
    Check("seed", "one seed gives the same tokens, others give others", _seeds, _SEED),
    Check("seeded_resume", "a sampled answer goes on behind its first half", _seeded_resume, _SEEDED_RESUME),
    Check("logit_bias", "a bias forces a token", _bias, _BIAS),
    Check("penalties", "a penalty lets another token win", _penalties, _PENALTIES),
    Check("min_tokens", "the end token is delayed", _min_tokens, _MIN_TOKENS),
    Check("guided_output", "a regular expression bounds the answer", _guided, _GUIDES),
    Check("guided_output", "JSON", _json, _GUIDES),
    Check("guided_resume", "a guided answer goes on behind its first half", _guided_resume, _GUIDED_RESUME),
)
