"""Step streams at the engine: frames of all slots of a client, renewal, cancels, and the end of a client."""

from __future__ import annotations

import threading

import pytest

from engines.contract.errors import EngineError
from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.step_frames import SlotProgress
from engines.contract.step_streams import SlotStream, StepStream, StepStreams
from kvmesh.triton import step_frames
from kvmesh.triton.step_frames import StepFrame
from tests.patience import Patience


class Sender:
    """The responses of one step-stream request. `gate`: each send waits for it."""

    def __init__(self) -> None:
        self.frames: list[StepFrame] = []
        self.is_over = False
        self.was_cancelled = False
        self.gate = threading.Event()
        self.gate.set()
        self.sending = threading.Event()

    def send(self, frame: bytes, *, is_last: bool) -> None:
        self.sending.set()
        assert self.gate.wait(10)
        assert not self.is_over, "a frame after the last one"
        self.is_over = is_last
        self.frames.append(step_frames.decode(frame))

    def is_cancelled(self) -> bool:
        return self.was_cancelled


def stream_of(sender: Sender) -> StepStream:
    stream = StepStream(1)
    stream.attach(sender)
    return stream


def opened(stream: StepStream, slot: int, key: int) -> SlotStream:
    """Open a slot."""
    made = SlotStream(key, stream, SlotProgress(slot))
    stream.open_slot(slot, made)
    return made


def test_ready_outputs_of_one_client_are_one_frame() -> None:
    """What becomes ready while a frame is sent is the next frame: each slot once, its outputs merged."""
    sender, queue = Sender(), OutputQueue()
    stream = stream_of(sender)
    for key in range(10, 14):
        queue.open(key, opened(stream, key, key))
    sender.gate.clear()
    queue.start()
    queue.put([(10, RequestOutput([1]))])
    assert sender.sending.wait(10)
    queue.put([(key, RequestOutput([2])) for key in range(10, 14)])
    queue.put([(key, RequestOutput([3], is_final=True, is_complete=True)) for key in range(10, 14)])
    sender.gate.set()
    bound = Patience(10.0)
    while queue.open_streams():
        assert not bound.is_over
    queue.close()
    first, second = sender.frames
    assert [(row.slot, row.token_ids) for row in first.tokens] == [(10, (1,))]
    assert [row.token_ids for row in second.tokens] == [(2, 3)] * 4
    assert [row.position for row in second.tokens] == [1, 0, 0, 0]
    assert [row.slot for row in second.final] == [10, 11, 12, 13] and all(
        row.is_complete for row in second.final
    )


def test_a_renewal_ends_the_former_request_and_loses_nothing() -> None:
    """The former request ends with its last frame, and the next frame has the next number."""
    old, new = Sender(), Sender()
    stream = stream_of(old)
    slot = opened(stream, 5, 50)
    slot.send(RequestOutput([1]))
    stream.attach(new)
    slot.send(RequestOutput([2], is_final=True, is_complete=True))
    assert [frame.number for frame in (*old.frames, *new.frames)] == [1, 2, 3]
    assert old.is_over and not new.is_over
    assert new.frames[0].tokens[0].position == 1


def test_cancels_name_open_slots_only() -> None:
    """Unknown and ended slots are ignored. A cancelled slot says so until its end, so the poller tells the engine again."""
    stream = stream_of(Sender())
    first, second = opened(stream, 1, 11), opened(stream, 2, 22)
    second.send(RequestOutput(is_final=True))
    assert stream.cancel([1, 2, 99]) == [11]
    assert first.is_cancelled() and not second.is_cancelled()
    with pytest.raises(EngineError, match="step_slot: 1"):
        opened(stream, 1, 12)
    opened(stream, 2, 23)


def test_the_end_of_a_client_cancels_its_slots_alone() -> None:
    """Its open slots are cancelled, later outputs are dropped, and its name is unknown. The other client goes on."""
    streams, gone, other = StepStreams(), Sender(), Sender()
    keys = iter((1, 2))
    streams.attach("gone", gone, lambda: next(keys))
    streams.attach("other", other, lambda: next(keys))
    slot, kept = opened(streams.find("gone"), 7, 70), opened(streams.find("other"), 7, 71)
    assert streams.end(1) == [70] and streams.end(1) == [] and gone.is_over
    slot.send(RequestOutput([1]))
    kept.send(RequestOutput([1]))
    assert slot.is_cancelled() and not kept.is_cancelled()
    assert len(gone.frames) == 1 and len(other.frames) == 1
    assert [key for key, _ in streams.live()] == [2]
    with pytest.raises(EngineError, match="Step stream is unknown"):
        streams.find("gone")
    with pytest.raises(EngineError, match="Step stream is unknown"):
        slot.stream.attach(Sender())
    streams.close()
    assert other.is_over
