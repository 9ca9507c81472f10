"""CPU of kvmesh and of routers: the figures, the page, the client's checks, and workers whose streams step together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from bench import options
from bench.pages import NOTES
from bench.peers import chat, costs, costs_page
from bench.peers.cost_client import ChatWire, GenerateWire
from bench.peers.cost_systems import BEHIND, FRONTEND, ROUTER, TABLES
from bench.peers.costs_page import About, Cost, CostRecord, Figures, FirstTokens
from bench.peers.stepping_worker import SteppingWorker
from bench.peers.streams import Outcome
from bench.processes import Fleet
from bench.results import BenchError
from bench.variants import NEW
from bench.word_load import WordLoad
from kvmesh import config
from kvmesh.inference.v1 import inference_pb2 as pb

WHOLE = Cost({FRONTEND: 20.0, ROUTER: 10.0, BEHIND: 30.0}, 3200.0)
MESH = Figures(
    idle=Cost({FRONTEND: 5000.0, ROUTER: 8000.0, BEHIND: 9000.0}, 1.0),
    token=WHOLE,
    short=Cost({FRONTEND: 1000.0, ROUTER: 500.0, BEHIND: 2000.0}, 100.0),
    long=Cost({FRONTEND: 2000.0, ROUTER: 500.0, BEHIND: 2000.0}, 50.0),
    first=FirstTokens(4.0, 9.0, 1.5, 2.0),
    arrived=1.0,
)
ALONE = Cost({ROUTER: 15.0}, 3200.0)
ROUTED = Figures(ALONE, ALONE, ALONE, ALONE, FirstTokens(2.0, 3.0, 1.5, 2.0), 0.99)


def record() -> CostRecord:
    """Return a record with three runs of kvmesh and one of a router."""
    made = CostRecord("command", {"date": "today", "load": "1"}, About())
    for frontend_us in (20.0, 30.0, 22.0):
        token = Cost({FRONTEND: frontend_us, ROUTER: 10.0, BEHIND: 30.0}, 3200.0)
        made.add("kvmesh", "abc", "its own", replace(MESH, token=token))
    made.add("smg", "1", "round_robin", ROUTED)
    return made


def test_the_sum_is_that_of_the_systems_own_processes() -> None:
    """Prefill and decode stand beside the sum; a router has no other role."""
    page = costs_page.page(record(), "")
    row = "| kvmesh abc | its own | 3 | 32.0 [30.0..40.0] | 22.0 [20.0..30.0] | 10.0 | 30.0 | 100 |"
    assert row in page
    assert "| smg 1 | round_robin | 1 | 15.0 | - | 15.0 | - | 99 |" in page
    assert "| kvmesh abc | its own | 3 | 1.50 | 1.00 | 0.50 | 2.00 | 100 |" in page
    assert "| kvmesh abc | its own | 3 | 2.50 | 7.00 | 4.00 | 9.00 | 1.50 | 2.00 |" in page


def test_notes_and_problems_are_on_the_page() -> None:
    """The part written by hand stays, and a system without figures is named with its reason."""
    made = record()
    made.problems.append("vllm-router, run 1: 80% of the paced tokens arrived")
    page = costs_page.page(made, f"old\n{NOTES}\n\nby me\n")
    assert page.endswith(f"{NOTES}\n\nby me\n") and "old\n" not in page
    assert "- vllm-router, run 1: 80% of the paced tokens arrived" in page


def test_work_that_was_not_done_has_no_cost() -> None:
    """A window without a token is an error, and no division by zero."""
    assert costs.cost({ROUTER: 3e6}, 1000, 2.0) == Cost({ROUTER: 3.0}, 500.0)
    with pytest.raises(BenchError, match="no request was finished"):
        costs.cost({ROUTER: 3e6}, 0, 2.0)


def test_the_mesh_that_is_measured_has_a_valid_configuration() -> None:
    """It has batched transports and step frames, and a tenant with every limit."""
    with Fleet() as fleet:
        built = config.load(fleet.write_config(NEW.over(TABLES)))
    assert (built.frontend.edge, built.mesh.hops, built.engine.step_frames) == ("batched", "batched", True)
    (tenant,) = built.tenants.values()
    assert tenant.requests_per_min and tenant.tokens_per_min and tenant.concurrency


def test_every_second_repeat_turns_around() -> None:
    """A slow drift of the machine burdens all alike."""

    def order(*, turns_around: bool) -> str:
        console = Console(file=StringIO())
        return "".join(case for case, *_ in options.repeated("ABC", 3, console, turns_around=turns_around))

    assert order(turns_around=True) == "ABCCBAABC"
    assert order(turns_around=False) == "ABCABCABC"


def test_streams_of_a_worker_have_common_steps() -> None:
    """Two streams that begin within a step get their next tokens at the same time, later than their first ones."""
    worker = SteppingWorker("worker-0", 0.02)
    began_s = [worker.start_s(now_s) for now_s in (1.001, 1.019, 1.021)]
    assert began_s[0] == began_s[1] and began_s[2] == pytest.approx(began_s[0] + 0.02)
    assert all(start <= now for start, now in zip(began_s, (1.001, 1.019, 1.021), strict=True))


def own_answer(*texts: str, finish: str = "length", counted: int) -> bytes:
    """Return an answer of tokens with texts of their own."""
    parts = [chat.chunk("", text) for text in texts]
    end = chat.chunk("", None, finish, chat.usage(1, 0, counted))
    return b"".join((*parts, end, chat.event(chat.DONE)))


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (own_answer("any", " text", counted=2), Outcome.DONE),
        (own_answer("any text", counted=2), Outcome.DONE),
        (own_answer("any", " text", counted=1), Outcome.LOST),
        (own_answer("any", " text", counted=3), Outcome.WRONG),
        (own_answer("any", " text", finish="stop", counted=2), Outcome.LOST),
    ],
)
def test_an_answer_with_texts_of_its_own_is_counted_by_its_usage(body: bytes, outcome: Outcome) -> None:
    """An event may have several tokens. The usage at the end has their number, and the checks of the end stay."""
    answer = chat.Answer(2, None)
    answer.feed(body)
    assert answer.verdict()[0] is outcome


def test_requests_name_the_served_model() -> None:
    """A mesh gets its model and a request for the usage; mock workers get the request of before."""
    own = json.loads(chat.request_body("a", 2, chat.Served("m", {}, None)))
    mock = json.loads(chat.request_body("a", 2))
    assert own.pop("stream_options") == {"include_usage": True}
    assert own == mock | {"model": "m"}


def tokens(position: int, count: int) -> pb.GenerateResponse:
    """Return a message with `count` tokens."""
    return pb.GenerateResponse(tokens=pb.Tokens(position=position, ids=range(500, 500 + count)))


LENGTH = pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH))
STOP = pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_END_TOKEN))


class Scripted:
    """A stub whose calls answer with given messages."""

    def __init__(self, *messages: pb.GenerateResponse) -> None:
        self.messages = messages
        self.is_cancelled = False

    def Generate(self, request: pb.GenerateRequest, **options: Any) -> Scripted:
        """See the client API."""
        return self

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        for message in self.messages:
            yield message

    def cancel(self) -> None:
        """See grpc.aio."""
        self.is_cancelled = True


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ((tokens(0, 1), tokens(1, 3), LENGTH), ""),
        ((tokens(0, 1), tokens(2, 2), LENGTH), "wrong: position 2, expected 1"),
        ((tokens(0, 3), LENGTH), "lost: 3 of 4 tokens"),
        ((tokens(0, 4), STOP), "lost: 4 of 4 tokens"),
        ((tokens(0, 4),), "lost: 4 of 4 tokens"),
    ],
)
async def test_only_a_whole_answer_of_kvmesh_is_good(
    messages: tuple[pb.GenerateResponse, ...], error: str
) -> None:
    """The checks are those of chat completions: each token in its order, none missing, the finish reason, the end."""
    stub: Any = Scripted(*messages)
    assert await GenerateWire(stub, "").ask("a b", 4, lambda _: None) == error
    assert stub.is_cancelled


async def test_the_client_counts_what_a_worker_sends() -> None:
    """Streams count their tokens while they last; a closed loop counts its requests and their errors."""
    worker = SteppingWorker("worker-0", 0.001)
    async with await worker.serve(0) as server:
        wire = ChatWire(server.sockets[0].getsockname()[1])
        counts: list[int] = []
        assert await wire.ask("some words", 5, counts.append) == ""
        assert sum(counts) == 5
        assert (await WordLoad(wire, 1).ask(5, 2, 0.0))["failed"] == 0
        wire.close()
    load = WordLoad(Broken(), 1)
    answer = await load.ask(5, 1, 0.0)
    assert answer["failed"] and not answer["finished"] and answer["faults"] == ["connection cut"]


class Broken:
    """A wire that loses every request."""

    async def ask(self, text: str, tokens: int, arrive: Callable[[int], None]) -> str:
        """See Wire."""
        return "connection cut"
