"""A first token that ends the answer, of an engine that omits its end token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.errors import NoHandoff
from tests.unit.prefill.test_core import PROMPT, Replica
from tests.unit.triton.fake_engine import facts, next_token

STOCK = facts(capabilities=replace(facts().capabilities, end_token=False))


def test_an_empty_answer_is_its_end_token() -> None:
    """The caller gets it as the first token, without a handoff, as from an engine that outputs it."""
    replica = Replica(model=STOCK, hides_end_token=True)
    view = replica.submit(1, end_token_id=next_token(PROMPT))
    replica.step()
    assert view.failure is None and view.ids == [next_token(PROMPT)]
    assert view.first is not None and not view.first.context_phase_params
    assert not view.first.HasField("logprob")
    assert replica.is_empty() and not replica.core.slot_table.blocks_reserved


@pytest.mark.parametrize("gives_handoffs", [True, False])
def test_an_answer_without_a_handoff_is_its_end_token_if_the_engine_gives_handoffs(
    gives_handoffs: bool,
) -> None:
    """TensorRT-LLM fails the call of such an answer. Without handoffs at all, the same text means another fault."""
    replica = Replica(model=STOCK)
    if gives_handoffs:
        replica.submit(1)
        replica.step()
    view = replica.submit(2, [7, 8, 9], end_token_id=next_token([7, 8, 9]))
    (call_id,) = replica.engine.live
    replica.engine.fail(call_id, NoHandoff("contextParams must be present in the response"), replica.now_s)
    replica.read()
    assert replica.core.prefilling.assumed_end_total == gives_handoffs
    if gives_handoffs:
        assert view.ids == [next_token([7, 8, 9])] and view.failure is None
    else:
        assert view.failure is not None and view.failure.code == pb.Failure.CODE_HANDOFF_LOST


def test_a_guided_answer_gets_no_end_token() -> None:
    """Its guide may have ended it."""
    capabilities = replace(STOCK.capabilities, guided_output=True)
    replica = Replica(model=facts(capabilities=capabilities), hides_end_token=True)
    view = replica.submit(1, end_token_id=next_token(PROMPT), guide=pb.Guide(kind=pb.Guide.KIND_JSON))
    replica.step()
    assert view.ids == [] and view.finish is not None
    assert view.finish.reason == pb.Finish.REASON_END_TOKEN
