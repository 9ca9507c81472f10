"""The end token of an engine that omits it: a caller of the decode replica sees no difference."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.capabilities import ModelFacts
from tests.unit.decode.test_core import GENERATION, LOCAL, PROMPT, Replica
from tests.unit.triton.fake_engine import expected, facts
from tests.unit.triton.reader import SlotView


def model(*, end_token: bool) -> ModelFacts:
    """Return a model whose output has its end token, or not."""
    return facts(capabilities=replace(facts().capabilities, end_token=end_token))


def run(seed: int, phase: pb.Phase.ValueType, *, hides: bool) -> SlotView:
    """Run one answer with the steps and the window of `seed`."""
    rng = random.Random(seed)
    replica = Replica(model=model(end_token=not hides), hides_end_token=hides)
    output = rng.randint(2, 8)
    ids = expected(PROMPT, output, -1)
    first = 1 if phase == GENERATION else 0  # a prefill has already ended where its token is the end
    end = rng.choice(ids[first:])
    if end in ids[:first]:
        end = -1
    start = rng.choice((0, 3))
    view = replica.submit(
        1,
        phase,
        output=output,
        end_token_id=end,
        start=start,
        logprobs=rng.random() < 0.5,
    )
    if phase == GENERATION:
        replica.hand_over(1)
    for _ in range(output):
        replica.pass_time(0.02)
        replica.engine.step(replica.now_s, rng.randint(1, 3))
        replica.pass_time(0.0)
    assert replica.is_empty()
    return view


@pytest.mark.parametrize("phase", [LOCAL, GENERATION])
def test_an_omitted_end_token_makes_no_difference(phase: pb.Phase.ValueType) -> None:
    """Tokens, positions, finish and the first row are those of an engine that outputs it."""
    for seed in range(200):
        plain, hidden = (run(seed, phase, hides=hides) for hides in (False, True))
        assert hidden.ids == plain.ids and hidden.finish == plain.finish, f"seed={seed}"
        assert hidden.next_position == plain.next_position, f"seed={seed}"
        assert (hidden.first is None) == (plain.first is None), f"seed={seed}"
        assert len(hidden.logprobs) == len(plain.logprobs), f"seed={seed}"


def test_the_appended_token_has_no_log_probability() -> None:
    """The engine told none, and 0 would say that the token was certain."""
    ids = expected(PROMPT, 4, -1)
    replica = Replica(model=model(end_token=False), hides_end_token=True)
    view = replica.submit(1, LOCAL, output=8, end_token_id=ids[3], logprobs=True)
    replica.step(8)
    assert view.ids == ids
    assert [math.isnan(each) for each in view.logprobs[-3:]] == [False, False, True]


def test_the_first_of_several_end_tokens_is_appended() -> None:
    """Which one ended the output is unknown."""
    ids = expected(PROMPT, 3, -1)
    replica = Replica(model=model(end_token=False), hides_end_token=True)
    view = replica.submit(1, LOCAL, output=8, end_token_id=ids[2], further_end_token_ids=[63, 62])
    replica.step(8)
    assert view.ids == ids and view.finish is not None
    assert view.finish.reason == pb.Finish.REASON_END_TOKEN


@pytest.mark.parametrize(("end_token_id", "guide"), [(-1, None), (63, pb.Guide(kind=pb.Guide.KIND_JSON))])
def test_nothing_is_appended_where_no_end_token_ended_the_output(
    end_token_id: int, guide: pb.Guide | None
) -> None:
    """A guide ends its output by itself, and a request without end tokens has none."""
    capabilities = replace(facts().capabilities, end_token=False, guided_output=True)
    replica = Replica(model=facts(capabilities=capabilities))
    view = replica.submit(1, LOCAL, output=6, end_token_id=end_token_id, guide=guide)
    replica.step(2)
    (call_id,) = replica.engine.live
    replica.engine.cancel(call_id)
    replica.core.sink.on_end(call_id, replica.now_s)
    replica.read()
    assert view.ids == expected(PROMPT, 2, -1)


def test_an_engine_that_outputs_its_end_token_after_all_gets_no_second_one() -> None:
    """A model of another release may not say that it does."""
    ids = expected(PROMPT, 4, -1)
    replica = Replica(model=model(end_token=False))
    view = replica.submit(1, LOCAL, output=8, end_token_id=ids[3])
    replica.step(8)
    assert view.ids == ids
