"""A client that does not read (slow reader): it costs one flow-control window, and delays no other client."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.surface import slow_reader
from tests.integration.frontend.calls import StuckCall, asking
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool, oracle
from tests.patience import wait_for

TAIL_S = 1.0
WRITE_EVERY_S = 0.55
"""Interval between reads of a slow client: shorter than the timeout of one write, and longer in sum."""


async def test_an_unread_stream_costs_one_window_and_delays_no_other(serving: Serving, pool: Pool) -> None:
    """The engine continues; the mesh sends one window; the tokens that pile up are sent as one message."""
    asked = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[9, 9, 9]), limits=pb.Limits(max_output_tokens=300))
    stuck = StuckCall(asked.SerializeToString())
    slow = asyncio.create_task(serving.frontend.service.serve(stuck))
    await until(lambda: bool(pool.runs) and pool.runs[0].log.end == 300, "the engine is done")
    run = pool.runs[0]
    assert run.log.sent == FLOW_CONTROL_WINDOW
    quick = [
        each
        async for reply in serving.stub.Generate(
            pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[8]), limits=pb.Limits(max_output_tokens=100))
        )
        for each in reply.tokens.ids
    ]
    assert quick == oracle([8], 100)
    assert run.log.sent == FLOW_CONTROL_WINDOW
    stuck.allowed.release()  # started
    stuck.allowed.release()  # all tokens that piled up
    await until(lambda: len(stuck.messages) == 2, "two messages")
    assert len(stuck.messages[1].tokens.ids) == FLOW_CONTROL_WINDOW
    for _ in range(400):
        stuck.allowed.release()
    await wait_for(slow, 5)
    ids = [each for message in stuck.messages for each in message.tokens.ids]
    assert ids == oracle([9, 9, 9], 300)
    assert len(stuck.messages) < 20
    await serving.until_empty()


@pytest.mark.parametrize("written", [0, 1])
async def test_a_client_that_does_not_read_the_end_is_cut(
    serving: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Its request is over: slot and budget are free a little later, for any behaviour of the client, and not before."""
    monkeypatch.setattr(slow_reader, "TAIL_S", 0.3)
    live = serving.frontend.core.admitted
    live.limit = 1
    stuck = StuckCall(asking(20))
    for _ in range(written):
        stuck.allowed.release()
    slow = asyncio.create_task(serving.frontend.service.serve(stuck))
    await until(lambda: bool(pool.submits) and not live.serving, "the request is over")
    with pytest.raises(MeshError, match="LIVE_REQUESTS_FULL"):
        live.check_capacity(0.0)
    with pytest.raises(MeshError) as caught:
        await wait_for(slow, 5)
    assert caught.value.reason == "SLOW_READER"
    live.check_capacity(0.0)
    await serving.until_empty()


async def test_a_slow_reader_cut_by_decode_gets_no_extra_time(serving: Serving, pool: Pool) -> None:
    """A slow reader that decode has cut: its slot is free at once, not after the 30 s for a finished request.

    The other client, which reads, gets all tokens.
    """
    stuck, reading = StuckCall(asking(300)), StuckCall(asking(300))
    reading.allowed = asyncio.Semaphore(1 << 20)
    pool.tokens_max = 100
    calls = [asyncio.create_task(serving.frontend.service.serve(one)) for one in (stuck, reading)]
    await until(
        lambda: [run.log.sent for run in pool.runs] == [FLOW_CONTROL_WINDOW, 100], "one reads, one does not"
    )
    for run in list(pool.runs):
        assert run.session is not None
        run.session.outbox.finish(run.slot, run.log.sent, attach.Finish.REASON_SLOW_READER)
        pool.drop(run)
    for call in calls:
        with pytest.raises(MeshError, match="SLOW_READER"):
            await asyncio.wait_for(call, slow_reader.TAIL_S / 3)
    assert sum(len(message.tokens.ids) for message in reading.messages) == 100
    await serving.until_empty()


async def test_a_slow_reader_gets_all_tokens(
    serving: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest after the end takes many times the timeout of one write: no stream is cut while writes complete."""
    monkeypatch.setattr(slow_reader, "TAIL_S", TAIL_S)
    stuck = StuckCall(asking(20))
    slow = asyncio.create_task(serving.frontend.service.serve(stuck))
    live = serving.frontend.core.admitted
    await until(lambda: bool(pool.submits) and not live.serving, "the request is over")
    loop = asyncio.get_running_loop()
    over_s = loop.time()
    while not slow.done():
        await asyncio.sleep(WRITE_EVERY_S)
        stuck.allowed.release()
    await slow
    assert loop.time() - over_s > TAIL_S
    assert [each for message in stuck.messages for each in message.tokens.ids] == oracle([9], 20)
    assert stuck.messages[-1].WhichOneof("event") == "finished"
