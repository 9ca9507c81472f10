"""Golden tokens of each version: those that its replicas have to give. Pure.

A version with a golden set of its own has them. For every other one, serving decode replicas of the pool give them. Two
replicas that agree make a reference. Where the pool has no other, two equal runs of the single one make it. Engines with
other digests have references of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from controlplane.rollouts.golden import Answer, GoldenSet, Prompt, compare
from controlplane.rollouts.view import GoldenState

REFERENCES_MAX: Final = 256
"""References that are kept. The earliest one is dropped first."""


class ReferenceKey(NamedTuple):
    """A model version on engines of one build."""

    model_version: str
    engine_digest: str
    """Empty: unknown."""


Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""Output tokens of each prompt."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a comparison with the golden tokens."""

    wrong: frozenset[int] = frozenset()
    """Positions of the prompts with wrong tokens."""
    difference: str = ""
    """The first difference."""
    missing: str = ""
    """Why an answer or the reference is absent. Empty: all are there."""
    equal: frozenset[int] = frozenset()
    """Positions of the prompts with the golden tokens."""


@dataclass(slots=True)
class _Reference:
    """The tokens of one key."""

    tokens: Tokens = ()
    """Empty: no reference yet."""
    claims: dict[str, tuple[str, Tokens]] = field(default_factory=dict)
    """Boot of the engine and its latest answers by serving replica, until two replicas agree."""


class References:
    """See the module. `fixed`: the prompts of versions without a set of their own."""

    def __init__(self, fixed: tuple[Prompt, ...], sets: Mapping[str, GoldenSet]) -> None:
        self._fixed = fixed
        self._sets = dict(sets)
        self._references: dict[ReferenceKey, _Reference] = {}

    def prompts(self, key: ReferenceKey) -> tuple[Prompt, ...]:
        """Return the golden prompts of a version."""
        own = self._sets.get(key.model_version)
        return own.prompts if own is not None else self._fixed

    def expected(self, key: ReferenceKey) -> Tokens:
        """Return the golden tokens; empty: not known yet."""
        own = self._sets.get(key.model_version)
        if own is not None:
            return own.outputs
        known = self._references.get(key)
        return known.tokens if known is not None else ()

    def learned(self, key: ReferenceKey) -> Tokens:
        """Return the golden tokens that replicas gave to the fixed prompts; empty: none, or the version has a set."""
        known = self._references.get(key)
        return known.tokens if known is not None and key.model_version not in self._sets else ()

    def has_claim(self, key: ReferenceKey, replica: str, engine_boot_id: str) -> bool:
        """True if that boot of a replica's engine has given its tokens already."""
        known = self._references.get(key)
        claim = known.claims.get(replica) if known is not None else None
        return claim is not None and claim[0] == engine_boot_id

    def claim(
        self,
        key: ReferenceKey,
        replica: str,
        engine_boot_id: str,
        answers: tuple[Answer, ...],
        *,
        is_alone: bool,
    ) -> None:
        """Take the answers of a serving decode replica, in place of its earlier ones.

        Equal answers of two replicas make the reference. `is_alone`: no other decode replica of the version could agree, so
        two equal runs of this one do. One run may have a token that differs by chance. It would condemn healthy replicas.
        """
        if any(each.error for each in answers) or len(answers) != len(self.prompts(key)):
            return
        known = self._references.setdefault(key, _Reference())
        tokens = tuple(each.token_ids for each in answers)
        agrees = any(
            given == tokens and (name != replica or is_alone) for name, (_, given) in known.claims.items()
        )
        known.claims[replica] = (engine_boot_id, tokens)
        if not known.tokens and agrees:
            known.tokens = tokens
        while len(self._references) > REFERENCES_MAX:
            del self._references[next(iter(self._references))]

    def restore(self, key: ReferenceKey, tokens: Tokens) -> None:
        """Take the tokens that a package kept, unless some are known already."""
        known = self._references.setdefault(key, _Reference())
        if not known.tokens and len(tokens) == len(self._fixed):
            known.tokens = tokens

    def compare(
        self,
        key: ReferenceKey,
        positions: tuple[int, ...],
        answers: tuple[Answer, ...],
        *,
        is_first_only: bool,
    ) -> Findings:
        """Compare the answers to the prompts at `positions`. Without a reference every answer is missing."""
        expected, prompts = self.expected(key), self.prompts(key)
        if not expected:
            return Findings(missing="the golden tokens of the version are not known yet")
        if len(answers) != len(positions):
            return Findings(missing=f"{len(answers)} of {len(positions)} golden prompts were run")
        wrong, equal, missing, difference = set(), set(), "", ""
        for at, answer in zip(positions, answers, strict=True):
            found = compare((prompts[at],), (expected[at],), (answer,), is_first_only=is_first_only)
            if found.state is GoldenState.RED:
                wrong.add(at)
                difference = difference or f"golden prompt {at}: {found.reason.partition(': ')[2]}"
            elif found.state is GoldenState.MISSING:
                missing = missing or f"golden prompt {at}: {answer.error}"
            else:
                equal.add(at)
        return Findings(frozenset(wrong), difference, missing, frozenset(equal))
