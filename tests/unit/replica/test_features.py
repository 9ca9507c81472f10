"""Features that a submit needs: one that the engine lacks is refused by its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.replica.features import missing
from kvmesh.triton.capabilities import Capabilities

ALL = Capabilities(
    penalties=True,
    logit_bias=True,
    min_tokens=True,
    top_logprobs=True,
    guided_output=True,
    guided_resume=True,
)
GUIDE = pb.Guide(kind=pb.Guide.KIND_JSON)


@pytest.mark.parametrize(
    ("fields", "capability", "field"),
    [
        ({"frequency_penalty": 1.0}, "penalties", "frequency_penalty"),
        ({"presence_penalty": -1.0}, "penalties", "frequency_penalty"),
        ({"repetition_penalty": 1.5}, "penalties", "frequency_penalty"),
        ({"bias_token_ids": [1]}, "logit_bias", "bias_token_ids"),
        ({"min_tokens": 1}, "min_tokens", "min_tokens"),
        ({"alternative_count": 1}, "top_logprobs", "alternative_count"),
        ({"guide": GUIDE}, "guided_output", "guide"),
    ],
)
def test_each_feature_is_needed_by_its_field(fields: dict[str, Any], capability: str, field: str) -> None:
    """And by no other one."""
    submit = pb.Submit(sampling=pb.Sampling(**fields))
    assert missing(submit, ALL) is None
    found = missing(submit, replace(ALL, **{capability: False}))
    assert found == (f"sampling.{field}", "the engine does not offer it")


def test_defaults_need_nothing() -> None:
    """A request of release 0.1.0 runs on every engine."""
    assert missing(pb.Submit(sampling=pb.Sampling(repetition_penalty=1.0)), Capabilities()) is None


def test_a_guided_output_goes_on_only_where_the_engine_knows_its_beginning() -> None:
    """Elsewhere the form would begin anew in the middle of the output."""
    submit = pb.Submit(sampling=pb.Sampling(guide=GUIDE), start_position=3)
    assert missing(submit, ALL) is None
    found = missing(submit, replace(ALL, guided_resume=False))
    assert found == ("sampling.guide", "the engine cannot go on behind a guided output")
