"""The choice of golden prompts: those before service and beside users, and the prefill that computes them. Pure.

A prompt of a shape that no pass has warmed is a cold step, at the cost of users who run other shapes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Final

from controlplane.rollouts.golden import Prompt
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.jobs import Shape, Target
from controlplane.warmup.life import Life
from controlplane.warmup.references import References

QUICK_PROMPTS: Final = 4
"""Golden prompts of a short probe: of a replica whose engine served before."""

RUNNING_MAX: Final = 4
"""Golden prompts at a time on a decode. A held one runs a batch that its passes have warmed. A prefill runs one at a time:
its engine would pack them into steps of other shapes.
"""

HELD_PROMPT_TOKENS_MAX: Final = 33
HELD_PROMPTS_MAX: Final = 32
WARM_PROMPTS_MAX: Final = 8
"""Golden prompts while a replica is held: short ones. The others follow while it serves."""

PARTS: Final = 4
"""Probes over which the golden prompts of a replica that users waited for are spread, BACKGROUND_RETRY_S apart."""


class PromptChoice:
    """See the module."""

    def __init__(self, references: References, fleet: Fleet) -> None:
        self._references = references
        self._fleet = fleet

    def beside_users(self, life: Life, prompts: Sequence[Prompt], now_s: float) -> tuple[int, ...]:
        """Return the golden prompts of a probe in service, or the suspects of one that is held."""
        if life.suspects:
            return tuple(sorted(life.suspects))
        wanted = self.in_service(life, now_s)
        if life.is_left_to_users(now_s):
            return self._batch_of(life, prompts) or wanted[:1]
        left = self.left(life, now_s)
        if life.is_hurried and life.is_awaited:  # its pool was short of capacity, and may still be
            left = next_part(left, life.positions, len(wanted))
        return left or wanted[:QUICK_PROMPTS]

    def before_service(self, life: Life, prompts: Sequence[Prompt], *, is_short: bool) -> tuple[int, ...]:
        """Return the golden prompts of a held replica without suspects."""
        warmed = self.warmed(life) or frozenset()
        held = held_positions(prompts, warmed)
        if not is_short:
            return held
        if life.is_known_engine:
            return quick_positions(held)
        batch = self._batch_of(life, prompts) if life.is_awaited else ()
        return batch or largest_position(prompts, warmed) or held[:1]

    def _batch_of(self, life: Life, prompts: Sequence[Prompt]) -> tuple[int, ...]:
        """Return the golden prompts that a decode runs beside each other for its users. Empty: no prefill computes them.

        Its users fill a batch. One prompt alone would be a cold step of a shape that they seldom meet.
        """
        held = held_positions(prompts, self.warmed(life) or frozenset())
        has_source = self.source_of(life, prompts, held) is not None
        return held[: life.warmed_batch or WARM_PROMPTS_MAX] if has_source else ()

    def running_max(self, life: Life, *, is_short: bool) -> int:
        """Return how many of its golden prompts run at a time."""
        if life.target.role == "prefill":
            return 1
        if is_short and not life.suspects:
            return max(RUNNING_MAX, len(life.positions))
        if life.serves:
            return RUNNING_MAX
        return life.warmed_batch or RUNNING_MAX

    def left(self, life: Life, now_s: float) -> tuple[int, ...]:
        """Return the golden prompts that the replica has yet to pass in service."""
        if life.was_proved:
            return ()
        return tuple(at for at in self.in_service(life, now_s) if at not in life.passed)

    def in_service(self, life: Life, now_s: float) -> tuple[int, ...]:
        """Return the golden prompts that run beside users.

        A prompt of a shape that the passes left out would be cold, at the cost of users who run other shapes. A queue fills
        the largest shape of a cold replica.
        """
        prompts = self._references.prompts(life.key)
        lengths = self.warmed(life)
        if not lengths:  # without a prompt nothing would be proved
            lengths = frozenset(map(shape_of, prompts))
        if life.is_left_to_users(now_s):
            lengths = largest_shape(prompts, lengths)
        return tuple(at for at, prompt in enumerate(prompts) if shape_of(prompt) in lengths)

    def warmed(self, life: Life) -> frozenset[int] | None:
        """Return the lengths of prompts that are warm where the golden prompts of `life` are computed. None: unknown."""
        source = None if life.runs_alone else self.source(life)
        there = life if source is None else self._fleet.lives.get(source.process_id)
        if there is None or there.warmed_lengths is None:
            return None
        return proving_lengths(self._references.prompts(life.key), there.warmed_lengths)

    def source(self, life: Life) -> Target | None:
        """Return the prefill that computes the prompts of a decode, as in service. None: a prefill, or there is none."""
        if life.target.role != "decode":
            return None
        found = [
            each
            for each in self._fleet.serving(life.target.pool, "prefill", life.key)
            if each.target.kv_address and each.target.block_tokens == life.target.block_tokens
        ]
        found = [each for each in found if each.is_proved] or found
        return found[zlib.crc32(life.name.encode()) % len(found)].target if found else None

    def source_of(self, life: Life, prompts: Sequence[Prompt], positions: Sequence[int]) -> Target | None:
        """Return the prefill that computes the golden prompts at `positions`. None: the replica computes them itself."""
        if life.runs_alone or life.suspects:  # the prefill may be the one that is wrong
            return None
        return self.source(life) if all(prompts[at].output_tokens > 1 for at in positions) else None


def held_positions(
    prompts: Sequence[Prompt], warmed_lengths: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Return the golden prompts to run while a replica is held: short ones, or the shortest if there are none.

    `warmed_lengths`: prompts of these shapes come instead, if there are enough. The shape of any other prompt may be cold.
    """
    by_length = sorted(range(len(prompts)), key=lambda at: (len(prompts[at].token_ids), at))
    warm = [at for at in by_length if shape_of(prompts[at]) in warmed_lengths]
    if len(warm) >= QUICK_PROMPTS:
        return tuple(sorted(warm[:WARM_PROMPTS_MAX]))
    short = [at for at in by_length if len(prompts[at].token_ids) <= HELD_PROMPT_TOKENS_MAX]
    return tuple(sorted((short or by_length[:QUICK_PROMPTS])[:HELD_PROMPTS_MAX]))


def next_part(left: Sequence[int], before: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the part of `left` that follows the probe of `before`, round and round.

    So prompts that never get an answer do not keep the others from their turn. `count`: prompts of all parts.
    """
    last, size = max(before, default=-1), max(QUICK_PROMPTS, -(-count // PARTS))
    return tuple(sorted(left, key=lambda at: (at <= last, at))[:size])


def quick_positions(held: tuple[int, ...]) -> tuple[int, ...]:
    """Return QUICK_PROMPTS of `held`, of all lengths."""
    return held[:: max(1, len(held) // QUICK_PROMPTS)][:QUICK_PROMPTS]


def largest_shape(prompts: Sequence[Prompt], lengths: frozenset[int]) -> frozenset[int]:
    """Return the largest shape in `lengths` that has a prompt: a queue fills that shape first. Empty: none has."""
    return frozenset(sorted(lengths.intersection(map(shape_of, prompts)))[-1:])


def largest_position(prompts: Sequence[Prompt], lengths: frozenset[int]) -> tuple[int, ...]:
    """Return one prompt of the largest shape in `lengths` that has any. Else none."""
    largest = largest_shape(prompts, lengths)
    return tuple(at for at, each in enumerate(prompts) if shape_of(each) in largest)[:1]


def proving_lengths(prompts: Sequence[Prompt], warmed: frozenset[int]) -> frozenset[int]:
    """Return the shapes whose golden prompts prove a replica that is warm for `warmed`.

    They are those of `warmed`. If no prompt has one of them, they are the nearest shape below, or the smallest.
    """
    shapes = {shape_of(each) for each in prompts}
    if not (warmed and shapes) or shapes & warmed:
        return warmed
    below = {each for each in shapes if each < max(warmed)}
    return frozenset({max(below) if below else min(shapes)})


def lengths_alone(shapes: Iterable[Shape]) -> frozenset[int]:
    """Return the lengths of the prompts that a replica runs alone."""
    return frozenset(each.prompt_tokens for each in shapes if each.batch == 1 and each.prompt_tokens)


def shape_of(prompt: Prompt) -> int:
    """Return the power of two at or above the length of the prompt."""
    return 1 << (len(prompt.token_ids) - 1).bit_length()
