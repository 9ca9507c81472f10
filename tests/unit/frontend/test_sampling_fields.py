"""Sampling fields as the engine gets them: end tokens, stop tokens, biases."""

from __future__ import annotations

import pytest
import xxhash

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.folder import NO_DEFAULTS
from services.frontend.surface import sampling_fields
from services.frontend.surface.sampling_fields import BIASES_MAX


def violations(sampling: pb.Sampling) -> list[tuple[str, str]]:
    return [(each.field, each.value) for each in sampling_fields.violations(sampling, 0, 200_000, 10)]


def digest(sampling: pb.Sampling) -> int:
    state = xxhash.xxh3_64()
    sampling_fields.asked(sampling, 0, NO_DEFAULTS).add_to(state, 10, is_written=False)
    return state.intdigest()


def test_stop_tokens_and_biases_are_kept_in_one_order() -> None:
    """Twice named is once meant, and a bias of 0 is none."""
    sampling = pb.Sampling(stop_token_ids=[5, 3, 5], logit_bias={9: 1.0, 2: -1.0, 4: 0.0}, ignore_eos=True)
    made = sampling_fields.asked(sampling, 0, NO_DEFAULTS)
    assert made.stop_token_ids == (5, 3) and made.ignores_eos
    assert made.resolved.bias == ((2, -1.0), (9, 1.0))


@pytest.mark.parametrize(
    "one",
    [
        pb.Sampling(stop_token_ids=[5]),
        pb.Sampling(ignore_eos=True),
        pb.Sampling(logit_bias={1: 1.0}),
        pb.Sampling(min_tokens=1),
    ],
)
def test_each_field_shapes_the_digest(one: pb.Sampling) -> None:
    """A resumed request must have it, too. What changes nothing does not count."""
    assert digest(one) != digest(pb.Sampling())
    assert digest(pb.Sampling(logit_bias={1: 0.0}, n=1)) == digest(pb.Sampling())


def test_too_many_biases_are_counted_and_not_read() -> None:
    """One violation for 100,000 wrong values."""
    many = pb.Sampling(logit_bias=dict.fromkeys(range(-1, 100_000), 999.0))
    assert violations(many) == [("sampling.logit_bias", "100001 tokens")]
    for count in (BIASES_MAX, BIASES_MAX + 1):
        found = violations(pb.Sampling(logit_bias=dict.fromkeys(range(count), 1.0)))
        assert len(found) == (count > BIASES_MAX)


@pytest.mark.parametrize(("n", "count"), [(0, 0), (1, 0), (2, 1), (-1, 1)])
def test_one_output_is_served(n: int, count: int) -> None:
    """More are refused."""
    assert len(violations(pb.Sampling(n=n))) == count
