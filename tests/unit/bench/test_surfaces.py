"""Clients of the surfaces: only a whole answer is good, and cancelled requests leave usable clients."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from bench import aims, bare_events, completions, kserve, report, surface_client
from bench.completions import Streamed, Whole
from bench.http_wire import CompletionWire
from bench.kserve import Responses
from bench.peers import chat
from bench.peers.stepping_worker import SteppingWorker
from bench.scenarios import surfaces
from bench.word_load import WordLoad, rotated
from tests.patience import patience

Check = Callable[[int, Callable[[int], None]], Any]


def events(*texts: str | None, finish: str = "length", counted: int | None = None) -> bytes:
    """Return the events of an answer with `texts`, its finish reason, its usage and [DONE]."""
    used = None if counted is None else chat.usage(1, 0, counted)
    parts = [chat.chunk("w", text) for text in texts]
    return b"".join((*parts, chat.chunk("w", None, finish, used), chat.event(chat.DONE)))


def numbered(*texts: str, positions: Sequence[int]) -> bytes:
    """Return the events of an answer with `texts`, their ids, the finish reason and [DONE]."""
    parts = [b"id: %d\n%b" % each for each in zip(positions, map(_event, texts), strict=True)]
    return b"".join((*parts, b"id: 9\n" + events()))


def _event(text: str) -> bytes:
    return chat.chunk("w", text)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (events("a", " b"), ""),
        (events("a", " b", counted=2), ""),
        (b": hello\n\n" + numbered("", "a", " b", positions=(0, 1, 2)), ""),
        (numbered("a b", positions=(2,)), ""),
        (numbered("a", "b", positions=(1, 1)), "an event with id 1 behind 1 tokens"),
        (numbered("a", positions=(1,)), "1 of 2 tokens"),
        (events("a", counted=1), "1 of 2 tokens"),
        (events("a", " b", finish="stop"), "finish reason stop, expected length"),
        (events("a", " b")[: -len(chat.event(chat.DONE))], "ended without [DONE]"),
        (events("a", " b") + b"x", "bytes behind [DONE]"),
        (events("a", " b") + chat.event(chat.DONE), "an event behind [DONE]"),
        (chat.event('{"error": {}}'), 'no event of a completion: {"error": {}}'),
    ],
)
def test_only_a_whole_stream_is_good(body: bytes, error: str) -> None:
    """The verdict is the same for a body in one piece and cut anywhere. Ids tell the tokens of an event."""
    for size in (1, 7, len(body)):
        arrived: list[int] = []
        answer = Streamed(2, arrived.append)
        for at in range(0, len(body), size):
            answer.feed(body[at : at + size])
        assert answer.verdict() == error
        assert sum(arrived) == answer.count
        assert error or answer.count == 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"choices": [{"text": "a b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}', ""),
        (b'{"choices": [{"message": {"content": "a b"}, "finish_reason": "length"}]}', ""),
        (b'{"choices": [{"text": "a", "finish_reason": "stop"}]}', "finish reason stop, expected length"),
        (b'{"choices": [{"text": "", "finish_reason": "length"}]}', "1 choices, or no text"),
        (b'{"choices": [', 'no completion: {"choices": ['),
    ],
)
def test_only_a_whole_answer_is_good(body: bytes, error: str) -> None:
    """Its tokens arrive together, and only if it is good."""
    arrived: list[int] = []
    answer = Whole(2, arrived.append)
    answer.feed(body[:9])
    answer.feed(body[9:])
    assert answer.verdict() == error
    assert arrived == ([] if error else [2])


@pytest.mark.parametrize("streams", [True, False])
async def test_completions_of_a_worker_are_counted(*, streams: bool) -> None:
    """Requests share kept connections. A cancelled request closes its own, and the next one opens another."""
    worker = SteppingWorker("worker-0", 0.001)
    async with await worker.serve(0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        wire = CompletionWire(address, completions.CHAT, chat.MODEL, streams=streams)
        load, arrived = WordLoad(wire, 1), list[int]()
        for _ in range(2):
            assert await wire.ask("some words", 5, arrived.append) == ""
        assert sum(arrived) == 10 and worker.connection_count == 1
        waiting = asyncio.create_task(wire.ask("some words", 100_000, arrived.append))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with patience(10):
            while worker.connection_count:
                await asyncio.sleep(0.005)
        times_ms = await load.first_tokens({"one": wire, "other": wire}, 2, 5)
        assert [len(each) for each in times_ms.values()] == [2, 2]
        wire.close()
    assert "no connection" in await wire.ask("some words", 5, arrived.append)


async def test_a_refusal_is_told() -> None:
    """The status and the start of the body name the reason of a failure, and does not end the client."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nno! xHTTP/1.1 200 OK\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        wire = CompletionWire(address, completions.CHAT, chat.MODEL, streams=True)
        assert await wire.ask("some words", 5, lambda _: None) == "status 404: no! x"
        wire.close()


def test_bare_events_are_those_of_a_completion() -> None:
    """The floor sends what the client of the surfaces counts, one token per event."""
    arrived: list[int] = []
    answer = Streamed(3, arrived.append)
    for position in (1, 2, 3):
        size, _, data = bare_events.event(position).partition(b"\r\n")
        assert int(size, 16) == len(data) - 2
        answer.feed(data[:-2])
    assert arrived == [1, 1, 1] and answer.verdict() == "ended without [DONE]"


def test_tokens_that_shared_an_event_arrive_with_the_usage() -> None:
    """Without ids of events the usage alone tells how many they were."""
    arrived: list[int] = []
    answer = Streamed(5, arrived.append)
    answer.feed(events("a b", "c", counted=5))
    assert arrived == [1, 1, 3] and answer.verdict() == "" and answer.count == 5


def response(request_id: str, ids: Sequence[int] = (), *, is_final: bool = False, error: str = "") -> Any:
    """Return a response of a model with token ids."""
    made = service_pb2.ModelStreamInferResponse(error_message=error)
    made.infer_response.id = request_id
    made.infer_response.parameters[kserve.FINAL].bool_param = is_final
    if ids:
        made.infer_response.outputs.add(name=kserve.OUTPUT_IDS, datatype="INT32", shape=[1, 1, len(ids)])
        made.infer_response.raw_output_contents.append(struct.pack(f"<{len(ids)}i", *ids))
    return made


def test_responses_of_a_stream_are_told_apart_by_their_ids() -> None:
    """A request ends with its final response, with its own error, or with the stream."""
    ended: dict[str, str] = {}
    arrived: list[int] = []
    responses = Responses()

    def begin(name: str) -> str:
        return responses.begin(3, arrived.append, lambda error: ended.update({name: error}))

    whole, short, bad, open_ = map(begin, ("whole", "short", "bad", "open"))
    for message in (
        response(whole, [7]),
        response(short, [7], is_final=True),
        response(whole, [8, 9]),
        response(bad, error="no such input", is_final=True),
        response(whole, is_final=True),
        response(whole, [1]),
        response(open_, [7]),
    ):
        responses.take(message)
    assert arrived == [1, 1, 2, 1]
    assert ended == {"whole": "", "short": "1 of 3 tokens", "bad": "no such input"}
    responses.end("UNAVAILABLE: gone")
    begin("late")
    assert ended["open"] == ended["late"] == "UNAVAILABLE: gone"


def test_requests_have_the_tensors_of_their_model() -> None:
    """The text is one BYTES element behind its length; ids are as many as the words."""
    draw = random.Random(1)
    text = kserve.request(kserve.ENSEMBLE, "1", "zwei Wörter", 4, draw)
    assert [one.name for one in text.inputs] == ["text_input", "max_tokens", "stream"]
    (length,) = struct.unpack_from("<I", text.raw_input_contents[0])
    assert text.raw_input_contents[0][4:].decode() == "zwei Wörter" and length == len("zwei Wörter".encode())
    ids = kserve.request(kserve.TENSORRT_LLM, "2", "a b c", 4, draw)
    assert [list(one.shape) for one in ids.inputs] == [[1, 3], [1, 1], [1, 1], [1, 1]]
    assert [len(data) for data in ids.raw_input_contents] == [12, 4, 4, 1]


def test_every_aim_has_a_surface() -> None:
    """An aim for a surface that is not measured would never be judged."""
    measured = {*surfaces.STREAMED, *surfaces.SHORT, *surfaces.FIRST}
    cases = [key.case for key in aims.AIMS if key.scenario == "surfaces"]
    assert cases and all(any(case.endswith(f", {surface}") for surface in measured) for case in cases)
    assert set(surfaces.COMPARED) | set(surfaces.COMPARED.values()) <= set(surfaces.FIRST)
    assert "surfaces" in report.TITLES and surface_client.GENERATE in measured


def test_every_surface_comes_first_in_turn() -> None:
    """No surface always follows the same neighbour at the start of a round."""
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
