"""The parts that checks work with: the engine, its pair, prompts, and the share that they may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvmesh.conformance import judgements
from kvmesh.conformance.offer import Offer
from kvmesh.conformance.prompts import Prompts
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.session import CALL_S, Session
from kvmesh.conformance.share import PROMPT_TOKENS, Share
from kvmesh.conformance.state_watch import StateWatch
from kvmesh.conformance.verdict import Judged, Outcome, Verdict, not_judged

FREE_S: Final = 1.0
"""Longest time until an engine has freed the blocks of a cancelled call."""

CANCELS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one run."""

    cancels: int = CANCELS
    seed: int = 0
    concurrency: int = 0
    """Open calls at once; 0: as `share` says."""
    end_ids: tuple[int, ...] = ()
    """End tokens of the model, which no prompt has."""
    is_hostile: bool = False
    """Also send input that may end an engine without checks of its own."""
    call_s: float = CALL_S
    check_s: float = 0.0
    """Timeout of each check; 0: its own."""
    free_s: float = FREE_S


@dataclass(slots=True)
class Trial:
    """One run of the checks."""

    engine: Session
    offer: Offer
    share: Share
    prompts: Prompts
    settings: Settings
    watch: StateWatch | None = None
    """None: the engine tells no load."""
    pair: Session | None = None
    """The engine that decodes what `engine` has prefilled; None: not given."""

    def prompt(self) -> tuple[int, ...]:
        """Return a prompt that the engine has not seen."""
        return self.prompts.draw(PROMPT_TOKENS)

    def long_prompt(self) -> tuple[int, ...]:
        """Return a prompt of two blocks and a half that the engine has not seen."""
        return self.prompts.draw(self.share.long_prompt_tokens)

    async def greedy(self, prompt: Sequence[int], output: int, **fields: Any) -> tuple[int, ...]:
        """Return the tokens of a greedy call. Raises Judged if they are not the same twice."""
        answers = [await self.engine.ask(prompt, output, **fields) for _ in range(2)]
        return judgements.steady(*answers)

    async def good(self, prompt: Sequence[int], output: int, **fields: Any) -> Recording:
        """Return the answer to a call that must end well. Raises Judged."""
        return judgements.good(await self.engine.ask(prompt, output, **fields))

    async def twice(self, judge: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """Judge a comparison of greedy answers; a fail counts if it is repeated.

        Results of an engine that is not batch-invariant vary by chance.
        """
        first = await judge()
        if first.outcome is not Outcome.FAIL:
            return first
        second = await judge()
        if second.outcome is Outcome.FAIL:
            return second
        return not_judged(f"it failed in one of two runs: {first.why}")

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Raises Judged if it is unknown."""
        if not self.offer.vocab_size:
            raise Judged(not_judged("the model does not tell its vocabulary: give --vocab-size"))
        return self.offer.vocab_size

    @property
    def block_tokens(self) -> int:
        """Size of a block. Raises Judged if it is unknown."""
        if not self.offer.tokens_per_block:
            raise Judged(
                not_judged("the model does not tell its block size: give --block-tokens or --metrics")
            )
        return self.offer.tokens_per_block

    @property
    def watched(self) -> StateWatch:
        """The watch, where a check needs it."""
        assert self.watch is not None
        return self.watch

    @property
    def other(self) -> Session:
        """The pair, where a check needs it."""
        assert self.pair is not None
        return self.pair
