"""Checks of step frames: the outputs of many calls on one stream."""

from __future__ import annotations

from typing import Final

from kvmesh.conformance import freeing
from kvmesh.conformance.check import Check, Need
from kvmesh.conformance.engine_state import EngineState
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.judgements import must, told
from kvmesh.conformance.share import OUTPUT_TOKENS
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict, failed, passed
from kvmesh.triton.capabilities import offers_step_frames

CALLS: Final = 2
"""Calls at once on the step stream."""

_CANCEL_AFTER: Final = 2
"""Tokens before the cancel."""


async def _same_tokens(trial: Trial) -> Verdict:
    async def once() -> Verdict:
        prompts = [trial.prompt() for _ in range(min(CALLS, trial.share.concurrency))]
        expected = [await trial.greedy(prompt, OUTPUT_TOKENS) for prompt in prompts]
        answers = await trial.engine.framed(prompts, OUTPUT_TOKENS)
        for answer, tokens in zip(answers, expected, strict=True):
            if answer.error is not None:
                return failed(f"a call on the step stream failed: {told(answer.error)}")
            if tuple(answer.tokens) != tokens:
                return failed(
                    f"a call on the step stream got {answer.tokens}, by its own stream {list(tokens)}"
                )
        return passed(f"{len(prompts)} calls on one stream: the tokens of their own streams")

    return await trial.twice(once)


async def _cancelled(trial: Trial) -> Verdict:
    async def cancel(_: EngineState) -> None:
        # The slot must end by its cancel: the end of the step stream, which follows, would free its blocks as well.
        (answer,) = await trial.engine.framed(
            [trial.prompt()],
            trial.share.single_tokens,
            cancel_after=_CANCEL_AFTER,
            cancel_s=trial.settings.free_s + trial.watched.source.look_s,
        )
        must("" if answer.error is None else f"a cancelled call failed: {told(answer.error)}")

    return await freeing.freed(trial, "after the cancel of a slot", cancel)


_FRAMES: Final = Need(
    lambda offer: offers_step_frames(offer.outputs, offer.parameters),
    "output step_frame, with parameter step_frames",
    FALLBACKS["step_frames"],
)

CHECKS: Final = (
    Check("step_frames", "calls on one stream", _same_tokens, _FRAMES),
    Check("step_frames", "the cancel of a slot frees its blocks", _cancelled, _FRAMES, needs_watch=True),
)
