"""Checks of disaggregated calls: prefill on the engine, decode on its pair."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvmesh.conformance import freeing, handoff_judgements, judgements
from kvmesh.conformance.check import Check, Need, capability_need
from kvmesh.conformance.engine_state import EngineState
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.judgements import told
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.share import OUTPUT_TOKENS
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Judged, Verdict, failed, judged, not_judged, not_offered
from kvmesh.triton.errors import HANDOFF_FAULTS, CallError
from kvmesh.triton.port import CallKind

Prompt = tuple[int, ...]

HELD_S: Final = 2.0
"""Time within which the load shows a handoff."""

FAULT_CHARACTERS: Final = 80
"""Longest text of an error of HANDOFF_FAULTS in a reason."""

CUT_BYTES: Final = 9


async def _prefilled(trial: Trial) -> tuple[Prompt, Recording]:
    """Return a new prompt and the prefill's answer to it. Raises Judged if that is wrong."""
    prompt = trial.long_prompt()
    answer = await trial.engine.ask(prompt, OUTPUT_TOKENS, kind=CallKind.CONTEXT_ONLY)
    judgements.must(handoff_judgements.prefill_fault(prompt, answer))
    return prompt, answer


async def _decoded(trial: Trial, prompt: Prompt, handoff: bytes) -> Recording:
    """Return the pair's answer to a generation_only call."""
    answer = await trial.other.ask(
        prompt,
        OUTPUT_TOKENS,
        kind=CallKind.GENERATION_ONLY,
        context_phase_params=handoff,
        kv_peer=trial.offer.kv_address,
    )
    if answer.error is None:
        trial.engine.pulled(handoff)
    return answer


async def _generated(trial: Trial, prompt: Prompt, handoff: bytes) -> Recording:
    """Return the pair's answer, which should be a good one.

    Raises Judged if handoffs do not work with a model that does not claim it: replicas find that out with the first one.
    """
    answer = await _decoded(trial, prompt, handoff)
    if not trial.offer.claims_handoffs and isinstance(answer.error, HANDOFF_FAULTS):
        fault = f"handoffs between these servers do not work: {told(answer.error, FAULT_CHARACTERS)}"
        raise Judged(not_offered(fault, FALLBACKS["disaggregated"]))
    return answer


async def _same_tokens(trial: Trial) -> Verdict:
    async def once() -> Verdict:
        prompt, first = await _prefilled(trial)
        rest = await _generated(trial, prompt, first.handoff)
        whole = await trial.greedy(prompt, OUTPUT_TOKENS)
        return handoff_judgements.same_tokens(prompt, first, rest, whole)

    return await trial.twice(once)


async def _first_token(trial: Trial) -> Verdict:
    prompt, first = await _prefilled(trial)
    rest = await _generated(trial, prompt, first.handoff)
    return handoff_judgements.first_token(prompt, first, rest)


async def _refused(trial: Trial, prompt: Prompt, handoff: bytes) -> Verdict:
    """Judge a generation_only call that must fail. The pair must serve behind it."""
    verdict = judgements.refused(await _decoded(trial, prompt, handoff), "")
    judgements.good(await trial.other.ask(trial.prompt(), 2))
    return verdict


async def _replayed(trial: Trial) -> Verdict:
    prompt, first = await _prefilled(trial)
    judgements.good(await _generated(trial, prompt, first.handoff))
    return await _refused(trial, prompt, first.handoff)


async def _cut(trial: Trial) -> Verdict:
    prompt, first = await _prefilled(trial)
    return await _refused(trial, prompt, first.handoff[:-CUT_BYTES])


async def _wrong_prompt(trial: Trial) -> Verdict:
    _, first = await _prefilled(trial)
    return await _refused(trial, trial.long_prompt(), first.handoff)


async def _released(trial: Trial) -> Verdict:
    async def release(start: EngineState) -> None:
        _, first = await _prefilled(trial)
        if not await trial.watched.reaches(start, 1, HELD_S):
            raise Judged(not_judged("the load did not show the held handoff"))
        for _ in range(2):  # it is idempotent
            try:
                await trial.engine.release(first.handoff)
            except CallError as error:
                raise Judged(failed(f"release_handoff failed: {told(error)}")) from None

    return await freeing.freed(trial, "after release_handoff", release)


async def _pulled(trial: Trial) -> Verdict:
    async def pull(_: EngineState) -> None:
        prompt, first = await _prefilled(trial)
        judgements.good(await _generated(trial, prompt, first.handoff))

    return await freeing.freed(trial, "after decode has pulled the handoff", pull)


async def _context_only(trial: Trial) -> Verdict:
    await _prefilled(trial)
    return judged("", "one response with the first token and a handoff")


HANDOFFS: Final = Need(
    lambda offer: "context_phase_params" in offer.inputs and "context_phase_params" in offer.outputs,
    "input and output context_phase_params",
    FALLBACKS["disaggregated"],
)
_RELEASE: Final = capability_need("release_handoff", 'parameter release_handoff "true"')


def _pair(name: str, run: Callable[[Trial], Awaitable[Verdict]], **needs: Any) -> Check:
    return Check("disaggregated", name, run, HANDOFFS, needs_pair=True, **needs)


CHECKS: Final = (
    Check("disaggregated", "context_only gives one token and a handoff", _context_only, HANDOFFS),
    _pair("tokens are those of an aggregated answer", _same_tokens),
    _pair("decode repeats the first token", _first_token),
    _pair("a pull frees the handoff", _pulled, needs_watch=True),
    _pair("a replayed handoff is refused", _replayed),
    _pair("a cut handoff is refused", _cut, is_hostile=True),
    _pair("a handoff of another prompt is refused", _wrong_prompt, is_hostile=True),
    Check("release_handoff", "a release frees the held blocks", _released, _RELEASE, needs_watch=True),
)
