"""The shell of a step stream over a scripted stream of gRPC: its requests, and how each end of it ends the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2

from engines.contract import step_frames
from engines.contract.outputs import RequestOutput
from engines.contract.step_frames import SlotProgress
from kvmesh.clock import MonotonicClock
from kvmesh.triton import step_link, subscription_policy
from kvmesh.triton.client import TritonClient
from kvmesh.triton.errors import EngineError, EngineLost, InvalidRequest
from kvmesh.triton.step_link import StepLink
from kvmesh.triton.tensors import RequestTensors
from tests.patience import patience
from tests.unit.triton.contract import Recorder, call

INPUTS = frozenset(("input_ids", "input_lengths", "request_output_len", "streaming"))


class Exchange:
    """A stream of gRPC: what was written, and responses that the test puts. An exception breaks it, None ends it."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.responses: asyncio.Queue[Any] = asyncio.Queue()
        self.is_cancelled = False
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def write(self, request: Any) -> None:
        await self.may_write.wait()
        self.written.append(request)

    async def read(self) -> Any:
        response = await self.responses.get()
        if isinstance(response, Exception):
            raise response
        return response

    def cancel(self) -> None:
        self.is_cancelled = True
        self.responses.put_nowait(EngineLost("cancelled"))


class Client:
    """Opens scripted streams."""

    address = "engine:1"

    def __init__(self) -> None:
        self.opened: list[Exchange] = []

    def exchange(self) -> Exchange:
        self.opened.append(Exchange())
        return self.opened[-1]

    def request(self, *arguments: Any) -> Any:
        return TritonClient.request(cast(Any, self), *arguments)

    model = "tensorrt_llm"


class Rig:
    """A link with its client, its sink and what it told."""

    def __init__(self) -> None:
        self.client, self.sink = Client(), Recorder()
        self.flushes = self.replaced_total = 0
        self.lost: list[str] = []
        self.released: list[bytes] = []
        self.number = 0
        self.link = StepLink(
            cast(Any, self.client),
            RequestTensors(INPUTS),
            self.sink,
            MonotonicClock(),
            after_event=self._flushed,
            on_frame=lambda _: None,
            on_lost=self.lost.extend,
            on_replaced=self._replaced,
            release=self.released.append,
        )

    def _flushed(self) -> None:
        self.flushes += 1

    def _replaced(self) -> None:
        self.replaced_total += 1

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with patience(5.0):
            while not is_true():
                await asyncio.sleep(0)

    async def started(self, count: int) -> Exchange:
        """Start calls 1 to `count`, and return their stream after it has their requests."""
        for number in range(1, count + 1):
            self.link.start(number, call(name=f"r{number}"))
        stream = self.client.opened[-1]
        await self.until(lambda: len(stream.written) == count + 1)
        return stream

    def send(self, *slots: int, is_last: bool = False, is_final: bool = False) -> None:
        """Send a frame with a first token of each slot."""
        self.number += 1
        outputs = [
            (SlotProgress(slot), RequestOutput([7], is_final=is_final, is_complete=is_final))
            for slot in slots
        ]
        self.client.opened[-1].responses.put_nowait(
            framed(step_frames.encode(self.number, outputs, is_last=is_last))
        )


def framed(payload: bytes) -> Any:
    """Return the response with a frame."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="step_frame")
    response.infer_response.raw_output_contents.append(payload)
    return response


def refused(text: str, request_id: str) -> Any:
    """Return the response with an error."""
    response = service_pb2.ModelStreamInferResponse(error_message=text)
    response.infer_response.id = request_id
    return response


def answered(request_id: str) -> Any:
    """Return a response without frames."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.id = request_id
    return response


def kinds(stream: Exchange) -> list[tuple[str, str]]:
    """Return what was written: the kind of each request, or its slot, and its further parameter."""
    return [
        (each.parameters["request_type"].string_param, each.parameters["step_slots"].string_param)
        if "request_type" in each.parameters
        else ("call", each.parameters["step_slot"].string_param)
        for each in stream.written
    ]


def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    """Run `test` with a rig, and check that nothing is left."""

    async def main() -> None:
        rig = Rig()
        await test(rig)
        await rig.link.close()
        assert len(asyncio.all_tasks()) == 1, "a task is left"

    asyncio.run(main())


def test_calls_and_cancels_share_one_stream() -> None:
    """One step-stream request comes first. Cancels of one turn are one request. A call that was not written is not sent."""

    async def test(rig: Rig) -> None:
        stream = await rig.started(3)
        stream.may_write.clear()
        rig.link.start(4, call(name="r4"))
        rig.link.start(5, call(name="r5"))
        await asyncio.sleep(0)
        for number in (5, 1, 2):
            rig.link.cancel(number)
        stream.may_write.set()
        await rig.until(lambda: kinds(stream)[-1][0] == "step_cancel")
        assert len(rig.client.opened) == 1
        assert kinds(stream) == [
            ("step_stream", ""),
            *(("call", f"{slot}") for slot in (1, 2, 3, 4)),
            ("step_cancel", "1,2"),
        ]
        assert rig.link.open_calls() == 4

    run(test)


def test_releases_share_the_stream_and_those_without_an_answer_outlive_it() -> None:
    """A refused release is over, as an answered one is. Without a stream a release is the caller's."""

    async def test(rig: Rig) -> None:
        assert not rig.link.release(b"early")
        stream = await rig.started(1)
        handoffs = [b"answered", b"refused", b"unanswered"]
        assert all(rig.link.release(each) for each in handoffs)
        await rig.until(lambda: len(stream.written) == 5)
        first, second, _ = (each.id for each in stream.written[2:])
        assert [each.raw_input_contents[-1][-6:] for each in stream.written[2:]] == [
            each[-6:] for each in handoffs
        ]
        stream.responses.put_nowait(answered(first))
        stream.responses.put_nowait(refused("unknown", second))
        stream.may_write.clear()
        assert rig.link.release(b"unwritten")
        await rig.until(stream.responses.empty)
        stream.responses.put_nowait(EngineLost("gone"))
        await rig.until(lambda: bool(rig.released))
        assert rig.released == [b"unanswered", b"unwritten"]
        assert rig.sink.heard(1).is_over()

    run(test)


def test_releases_without_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers none costs no memory without end."""
    monkeypatch.setattr(step_link, "RELEASES_MAX", 3)

    async def test(rig: Rig) -> None:
        await rig.started(1)
        assert [rig.link.release(b"%d" % number) for number in range(5)] == [True] * 3 + [False] * 2

    run(test)


def test_releases_are_awaited_until_their_answers_or_the_end_of_the_stream() -> None:
    async def test(rig: Rig) -> None:
        await rig.link.released()
        stream = await rig.started(1)
        await rig.link.released()
        for _ in range(2):
            assert rig.link.release(b"answered")
        waiting = asyncio.create_task(rig.link.released())
        await rig.until(lambda: len(stream.written) == 4)
        stream.responses.put_nowait(answered(stream.written[2].id))
        await rig.until(stream.responses.empty)
        assert not waiting.done()
        stream.responses.put_nowait(answered(stream.written[3].id))
        await rig.until(waiting.done)
        assert rig.link.release(b"unanswered")
        waiting = asyncio.create_task(rig.link.released())
        stream.responses.put_nowait(EngineLost("gone"))
        await rig.until(waiting.done)

    run(test)


def test_a_request_that_cannot_be_made_fails_the_calls_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> Any:
        raise RuntimeError("bug")

    async def test(rig: Rig) -> None:
        stream = await rig.started(1)
        monkeypatch.setattr(RequestTensors, "of_release", bug)
        assert rig.link.release(b"kept")
        await rig.until(lambda: rig.sink.heard(1).is_over())
        assert isinstance(rig.sink.heard(1).error, EngineError)
        assert rig.released == [b"kept"] and stream.is_cancelled

    run(test)


def test_a_stream_that_another_model_begins_again_is_lost() -> None:
    """After a reload a renewal goes to the new model, whose frames begin at 1. They would be taken for known ones."""

    async def test(rig: Rig) -> None:
        await rig.started(2)
        rig.send(1)
        rig.send(1)
        rig.number = 0
        rig.send(2)
        await rig.until(lambda: rig.sink.heard(2).is_over())
        assert all(isinstance(rig.sink.heard(number).error, EngineLost) for number in (1, 2))
        assert rig.replaced_total == 1 and rig.lost == ["r1", "r2"]

    run(test)


def test_a_renewal_that_cannot_be_written_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends with the last frame of the request that was written."""
    monkeypatch.setattr(subscription_policy, "RENEW_BYTES", 1500)

    async def test(rig: Rig) -> None:
        stream = await rig.started(1)
        stream.may_write.clear()
        rig.link.start(2, call(name="r2"))
        await asyncio.sleep(0)
        for _ in range(6):
            rig.send(1)
        await rig.until(stream.responses.empty)
        stream.may_write.set()
        await rig.until(lambda: kinds(stream)[-1] == ("step_stream", ""))
        rig.send(is_last=True)
        rig.send(is_last=True)
        await rig.until(lambda: stream.is_cancelled)
        assert kinds(stream).count(("step_stream", "")) == 2

    run(test)


def test_a_frame_is_one_event() -> None:
    """The service is told once for a frame, whatever the number of its rows."""

    async def test(rig: Rig) -> None:
        await rig.started(3)
        rig.send(1, 2, 3)
        await rig.until(lambda: bool(rig.flushes))
        assert rig.flushes == rig.sink.steps == 1 and all(
            rig.sink.heard(number).ids == [7] for number in (1, 2, 3)
        )

    run(test)


def test_a_stream_is_renewed_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request is written before the former one ends. The last frame of a renewed one ends no call."""
    monkeypatch.setattr(subscription_policy, "RENEW_BYTES", 1500)

    async def test(rig: Rig) -> None:
        stream = await rig.started(2)
        rig.send(1)
        rig.send()
        await rig.until(lambda: kinds(stream)[-1] == ("step_stream", ""))
        rig.send(is_last=True)
        rig.send(2)
        await rig.until(lambda: rig.sink.heard(2).ids == [7])
        assert kinds(stream).count(("step_stream", "")) == 2 and not stream.is_cancelled
        names = {each.parameters["step_stream"].string_param for each in stream.written}
        assert len(names) == 1

    run(test)


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (framed(b"\x01\x00"), EngineError),
        (framed(b"\x09" + bytes(31)), EngineError),
        (refused("Step stream is unknown or over", "r1"), EngineLost),
        (refused("engine is shutting down", "step-stream"), EngineLost),
        (EngineLost("Socket closed"), EngineLost),
        (None, EngineLost),
        (framed(step_frames.encode(1, [], is_last=True)), EngineLost),
    ],
    ids=["truncated", "version", "unknown", "refused", "broken", "ended", "last"],
)
def test_the_end_of_a_stream_fails_its_calls(response: Any, kind: type[Exception]) -> None:
    """All calls fail with one typed error. The stream is cancelled, so the engine frees their KV. The next call opens
    another stream, under another name.
    """

    async def test(rig: Rig) -> None:
        stream = await rig.started(2)
        stream.responses.put_nowait(response)
        await rig.until(lambda: rig.sink.heard(2).is_over())
        assert all(type(rig.sink.heard(number).error) is kind for number in (1, 2))
        assert stream.is_cancelled and not rig.link.open_calls()
        assert rig.lost == (["r1", "r2"] if kind is EngineLost else [])
        assert rig.replaced_total == ("unknown" in f"{response}")
        rig.link.start(3, call(name="r3"))
        await rig.until(lambda: len(rig.client.opened[1].written) == 2)
        first, second = (one.written[0].parameters["step_stream"].string_param for one in rig.client.opened)
        assert first != second
        rig.send(3)
        await rig.until(lambda: rig.sink.heard(3).ids == [7])

    run(test)


def test_a_refusal_of_one_request_fails_its_call_alone() -> None:
    """Triton's own errors name their request. An error of an unknown request ends nothing."""

    async def test(rig: Rig) -> None:
        stream = await rig.started(2)
        stream.responses.put_nowait(refused("unexpected shape for input 'input_ids'", "r1"))
        stream.responses.put_nowait(refused("step_slots: allowed", "step-cancel"))
        rig.send(2)
        await rig.until(lambda: rig.sink.heard(2).ids == [7])
        assert isinstance(rig.sink.heard(1).error, InvalidRequest) and rig.link.open_calls() == 1

    run(test)


def test_a_stream_to_an_unloaded_model_ends_with_its_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """New calls fail at once, and those of the stream go on. The stream is not renewed. After its last call it ends, so
    that Triton can unload the model, and the next call opens another stream.
    """
    monkeypatch.setattr(subscription_policy, "RENEW_BYTES", 1)

    async def test(rig: Rig) -> None:
        stream = await rig.started(3)
        gone = "Request for unknown model: 'tensorrt_llm' has no available versions"
        for number in (1, 2):
            stream.responses.put_nowait(refused(gone, f"r{number}"))
        rig.send(3)
        await rig.until(lambda: rig.sink.heard(3).ids == [7])
        assert rig.replaced_total == 1 and not stream.is_cancelled
        assert all(isinstance(rig.sink.heard(number).error, EngineLost) for number in (1, 2))
        rig.send(3, is_final=True)
        await rig.until(lambda: stream.is_cancelled)
        assert rig.sink.heard(3).events[-1] == "end" and not rig.link.open_calls()
        assert kinds(stream).count(("step_stream", "")) == 1
        rig.link.start(4, call(name="r4"))
        assert len(rig.client.opened) == 2

    run(test)


def test_a_renewal_that_an_unloaded_model_refuses_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the stream go on by its former request, and it is not renewed again."""
    monkeypatch.setattr(subscription_policy, "RENEW_BYTES", 1500)

    async def test(rig: Rig) -> None:
        stream = await rig.started(1)
        rig.send(1)
        rig.send()
        await rig.until(lambda: kinds(stream)[-1] == ("step_stream", ""))
        gone = "Request for unknown model: 'tensorrt_llm' has no available versions"
        stream.responses.put_nowait(refused(gone, "step-stream"))
        for _ in range(4):
            rig.send()
        rig.send(1, is_final=True)
        await rig.until(lambda: stream.is_cancelled)
        assert rig.sink.heard(1).events[-1] == "end" and rig.replaced_total == 1
        assert kinds(stream).count(("step_stream", "")) == 2

    run(test)


def test_a_link_ends_while_nothing_can_be_written() -> None:
    """The engine accepts the connection and reads nothing: a loss and a close end both tasks."""

    async def test(rig: Rig) -> None:
        rig.link.start(1, call())
        rig.client.opened[0].may_write.clear()
        await asyncio.sleep(0)
        rig.link.lose(EngineLost("silent"))
        assert isinstance(rig.sink.heard(1).error, EngineLost)
        await rig.until(lambda: len(asyncio.all_tasks()) == 1)
        rig.link.start(2, call())
        rig.client.opened[1].may_write.clear()
        await asyncio.sleep(0)
        rig.link.cancel(2)
        assert not rig.link.open_calls()

    run(test)
