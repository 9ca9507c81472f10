"""Conversations of a game day: the same seed gives the same ones, and their answers are those of the engine."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.gameday import drawing
from tests.gameday.conversations import SYSTEM_TOKENS, Conversation, Demand, cost_of
from tests.gameday.shapes import BLOCK_TOKENS, KINDS, MIXED, REGIONS, SEQUENCE_TOKENS, SHAPES, Shape, configs

VERSIONS = ("v1", "v2")


@pytest.fixture(scope="module")
def drawn() -> list[Conversation]:
    """Conversations of two versions."""
    truths = drawing.truths_of(VERSIONS)
    return [
        drawing.conversation(number, 0.0, "eu", VERSIONS, truths, "seed", kind="" if number else KINDS[0])
        for number in range(60)
    ]


def test_the_same_seed_gives_the_same_conversation(drawn: list[Conversation]) -> None:
    """A conversation depends on the seed and its number alone."""
    again = drawing.conversation(7, 0.0, "eu", VERSIONS, drawing.truths_of(VERSIONS), "seed")
    other = drawing.conversation(7, 0.0, "eu", VERSIONS, drawing.truths_of(VERSIONS), "other")
    assert again == drawn[7] and other != drawn[7]


def test_each_version_has_answers_of_its_own(drawn: list[Conversation]) -> None:
    """Answers have the asked length and fit the longest sequence; two versions differ."""
    for each in drawn:
        said = 0
        for turn in each.turns:
            assert {len(output) for output in turn.outputs.values()} == {turn.output_tokens}
            assert turn.outputs["v1"] != turn.outputs["v2"]
            said += len(turn.message) + turn.output_tokens
        assert said < SEQUENCE_TOKENS


def test_conversations_share_system_prompts_and_mix_kinds(drawn: list[Conversation]) -> None:
    """There are as many beginnings as system prompts, and every kind of caller."""
    beginnings = {each.turns[0].message[:SYSTEM_TOKENS] for each in drawn}
    assert len(beginnings) == drawing.SYSTEMS
    assert {each.kind for each in drawn} == set(KINDS)


def test_the_cost_of_a_turn_counts_whole_cached_blocks(drawn: list[Conversation]) -> None:
    """A turn costs at least its new tokens and the last answer, and at most a block more."""
    uncached, prompts = cost_of(drawn)
    fresh = []
    for each in drawn:
        fresh.append(len(each.turns[0].message) - SYSTEM_TOKENS)
        fresh += [len(turn.message) + before.output_tokens for before, turn in pairwise(each.turns)]
    mean = sum(fresh) / len(fresh)
    assert mean <= uncached <= mean + BLOCK_TOKENS
    assert 0.75 < 1.0 - uncached / prompts < 0.85


def test_arrivals_follow_the_demand_of_each_region() -> None:
    """The number of conversations is that of a Poisson process, within five standard deviations, in each step."""
    demands = [Demand("eu", 2.0), Demand("us", 1.0), Demand("eu", 6.0, 100.0), Demand("eu", 0.0, 200.0)]
    found = drawing.arrivals(demands, 300.0, random.Random(3))
    assert found == sorted(found)
    for home, from_s, to_s, mean in (
        ("eu", 0, 100, 200),
        ("eu", 100, 200, 600),
        ("eu", 200, 300, 0),
        ("us", 0, 300, 300),
    ):
        count = sum(from_s <= at_s < to_s and each == home for at_s, each in found)
        assert abs(count - mean) <= 5 * mean**0.5, (home, from_s, count)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape_is_a_valid_configuration(shape: Shape) -> None:
    """Each region has its replicas, its name and its version; pinned tenants may use their own region alone."""
    made = configs(shape, REGIONS)
    for name, config in made.items():
        assert (config.region.name, next(iter(config.versions))) == (name, shape.version(name))
        assert (config.prefill.replicas, config.decode.replicas) == shape.replicas_of(name)
        assert {each: config.tenants[f"pinned-{each}"].regions for each in REGIONS} == {
            each: (each,) for each in REGIONS
        }


def test_regions_one_version_apart_have_different_salts() -> None:
    """The versions of the mixed shape have different tokens."""
    made = configs(MIXED, REGIONS[:2])
    assert len({version.salt for config in made.values() for version in config.versions.values()}) == 2
