"""Claims of replicas under random schedules: a replica never agrees with itself beside another one."""

from __future__ import annotations

import random

from controlplane.rollouts.golden import Answer, fixed_prompts
from controlplane.warmup.references import ReferenceKey, References

PROMPTS = fixed_prompts(256, 1024)[:3]
KEY = ReferenceKey("v1", "build")
RIGHT = ((1, 2), (3, 4), (5, 6))
WRONG = ((1, 2), (3, 9), (5, 6))


def _answers(tokens: tuple[tuple[int, ...], ...]) -> tuple[Answer, ...]:
    return tuple(Answer(each) for each in tokens)


def test_two_replicas_that_agree_make_a_reference() -> None:
    """Under random claims a reference needs equal latest tokens of two replicas."""
    for seed in range(500):
        rng, references = random.Random(seed), References(PROMPTS, {})
        claims: dict[str, tuple[tuple[int, ...], ...]] = {}
        known: tuple[tuple[int, ...], ...] = ()
        for step in range(12):
            name, tokens = rng.choice("abc"), rng.choice((RIGHT, WRONG, ((7,), (8,), (9,))))
            claims[name] = tokens
            references.claim(KEY, name, f"e{step}", _answers(tokens), is_alone=False)
            if not known and list(claims.values()).count(tokens) > 1:
                known = tokens
            assert references.expected(KEY) == known, f"seed={seed}"
            assert references.has_claim(KEY, name, f"e{step}")
            assert not references.has_claim(KEY, name, f"e{step - 1}")


def test_a_replica_does_not_agree_with_its_earlier_boot() -> None:
    """A wrong machine that restarts gives the same wrong tokens again."""
    references = References(PROMPTS, {})
    references.claim(KEY, "right", "e1", _answers(RIGHT), is_alone=False)
    for boot in range(5):
        references.claim(KEY, "wrong", f"e{boot}", _answers(WRONG), is_alone=False)
        assert references.expected(KEY) == ()
    references.claim(KEY, "other", "e1", _answers(RIGHT), is_alone=False)
    assert references.expected(KEY) == RIGHT


def test_comparison_names_every_wrong_prompt() -> None:
    """Random answers: exactly the differing ones are wrong, and an absent one is missing, not wrong."""
    references = References(PROMPTS, {})
    references.restore(KEY, RIGHT)
    for seed in range(300):
        rng = random.Random(seed)
        positions = tuple(rng.sample(range(3), rng.randrange(1, 4)))
        kinds = [rng.choice(("right", "wrong", "absent", "short")) for _ in positions]
        given = {
            "right": lambda at: Answer(RIGHT[at]),
            "wrong": lambda at: Answer((RIGHT[at][0], 77)),
            "short": lambda at: Answer(RIGHT[at][:1]),
            "absent": lambda at: Answer(error="lost"),
        }
        answers = tuple(given[kind](at) for at, kind in zip(positions, kinds, strict=True))
        found = references.compare(KEY, positions, answers, is_first_only=False)
        wrong = {at for at, kind in zip(positions, kinds, strict=True) if kind in ("wrong", "short")}
        assert found.wrong == wrong and bool(found.missing) is ("absent" in kinds), f"seed={seed}"
    assert references.compare(KEY, (0, 1), (Answer(RIGHT[0]),), is_first_only=False).missing


def test_a_replica_alone_gives_equal_tokens_twice() -> None:
    """The two runs follow each other. An earlier boot that differed does not count."""
    references = References(PROMPTS, {})
    for boot, tokens in (("e1", WRONG), ("e2", RIGHT), ("e2", WRONG), ("e3", RIGHT)):
        references.claim(KEY, "a", boot, _answers(tokens), is_alone=True)
        assert references.expected(KEY) == ()
    references.claim(KEY, "a", "e3", _answers(RIGHT), is_alone=True)
    assert references.expected(KEY) == RIGHT
