"""The golden prompts that run while a replica is held."""

from __future__ import annotations

from controlplane.rollouts.golden import Prompt, fixed_prompts
from controlplane.warmup.prompt_choice import HELD_PROMPT_TOKENS_MAX, WARM_PROMPTS_MAX, held_positions

PROMPTS = fixed_prompts(256, 4096)


def lengths(*warmed: int) -> list[int]:
    """Return the lengths of the chosen prompts."""
    return [len(PROMPTS[at].token_ids) for at in held_positions(PROMPTS, frozenset(warmed))]


def test_prompts_of_warmed_shapes_come_first() -> None:
    """Any other prompt would meet a cold shape while the replica is held."""
    chosen = lengths(64, 128)
    assert 4 <= len(chosen) <= WARM_PROMPTS_MAX and all(32 < each <= 128 for each in chosen)


def test_short_prompts_run_without_enough_of_a_warmed_shape() -> None:
    """A shape of which the set has one prompt proves little."""
    assert lengths() == lengths(1) == lengths(1 << 20)
    assert lengths() and max(lengths()) <= HELD_PROMPT_TOKENS_MAX


def test_a_set_of_long_prompts_gives_its_shortest() -> None:
    """An own golden set may have no short prompt."""
    assert held_positions([Prompt((1,) * size, 1) for size in (900, 800, 700)]) == (0, 1, 2)
