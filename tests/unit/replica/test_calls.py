"""Engine calls of a submit: which parameters they carry, also when the submit continues an output."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.replica.calls import engine_call, extras_of, seed_call
from kvmesh.triton.port import CallKind, GuideKind, SamplingExtras


def submit(received: int = 0, **sampling: object) -> pb.Submit:
    """Return a submit with a prompt of five tokens, which continues behind `received` tokens."""
    made = pb.Submit(token_ids=frames.pack_ids(range(5 + received)), start_position=received)
    made.sampling.CopyFrom(pb.Sampling(temperature=1.0, top_p=1.0, **sampling))  # type: ignore[arg-type]
    made.budget.max_output_tokens = 9
    return made


@pytest.mark.parametrize("received", [0, 3])
def test_defaults_are_no_extras(received: int) -> None:
    """Most requests have none, and their calls stay as small as before."""
    assert extras_of(submit(received)) is None
    assert extras_of(submit(received, repetition_penalty=1.0)) is None


def test_extras_say_where_the_output_began() -> None:
    """A resumed request goes on with the penalties of its whole output, and with what is left of its minimum."""
    fields: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "bias_token_ids": [3, 9],
        "bias_values": [1.0, -2.0],
        "min_tokens": 4,
        "alternative_count": 2,
        "guide": pb.Guide(kind=pb.Guide.KIND_REGEX, text="a+"),
    }
    wanted = SamplingExtras(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        bias=((3, 1.0), (9, -2.0)),
        min_tokens=4,
        alternatives=2,
        guide_kind=GuideKind.REGEX,
        guide="a+",
        output_start=5,
    )
    assert extras_of(submit(**fields)) == wanted
    resumed = extras_of(submit(3, **fields))
    assert resumed is not None and (resumed.output_start, resumed.min_tokens) == (5, 1)
    late = extras_of(submit(6, **fields))
    assert late is not None and (late.output_start, late.min_tokens) == (5, 0)


def test_end_tokens_reach_the_engine_and_end_no_seed() -> None:
    """A seed pulls blocks, whatever its first token is."""
    one = submit(min_tokens=2)
    one.end_token_id = 7
    one.further_end_token_ids.extend([8, 9])
    call = engine_call(one, CallKind.CONTEXT_ONLY, 1.0)
    assert (call.end_token_id, call.further_end_token_ids) == (7, (8, 9))
    assert frames.end_token_ids(one) == {7, 8, 9}
    seed = seed_call(one, pb.Handoff(), 1.0)
    assert (seed.end_token_id, seed.further_end_token_ids, seed.extras) == (-1, (), None)
