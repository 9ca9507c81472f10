"""Output without an engine: each stream gets one token per step, on an absolute schedule. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb

TOKENS = 4096
_FIRST_ID = 400
_IDS = [frames.pack_ids([_FIRST_ID + (position * 7919) % 3000]) for position in range(TOKENS)]


def token_at(position: int) -> bytes:
    """Return the token of every paced stream at `position`: known to sinks, never an end token."""
    return _IDS[position % TOKENS]


def token_id_at(position: int) -> int:
    """Return the same token as a number."""
    return frames.unpack_ids(token_at(position))[0]


@dataclass(slots=True)
class PacedStream:
    """One stream. Positions [sent, made) wait for the flow-control window. INVARIANT: sent <= made <= end."""

    slot: int
    made: int
    sent: int
    end: int
    window: int


@dataclass(slots=True)
class Counters:
    """Totals of a source since its start."""

    submits: int = 0
    tokens: int = 0
    frames: int = 0
    steps: int = 0
    late_steps: int = 0
    """Steps that began more than a quarter of a step late; the source was too slow for its rate."""
    stalls: int = 0
    """Steps of a stream in which its closed flow-control window let no token pass."""
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PacedStreams:
    """The live streams of one Attach stream. INVARIANT: the keys are the slots of the values."""

    counters: Counters
    streams: dict[int, PacedStream] = field(default_factory=dict)

    def start(self, slot: int, position: int, end: int, window: int) -> None:
        """Continue from `position` to `end`, one token per step."""
        self.streams[slot] = PacedStream(slot, position, position, end, window)

    def grant(self, slot: int, position: int) -> None:
        """Raise the flow-control window of `slot`; unknown slots are ignored."""
        stream = self.streams.get(slot)
        if stream is not None and position > stream.window:
            stream.window = position

    def stop(self, slot: int) -> None:
        """Forget `slot`; unknown slots are ignored."""
        self.streams.pop(slot, None)

    def step(self, outbox: DownwardOutbox, phase: int = 0, phases: int = 1) -> None:
        """Make one token for every stream of this phase (slot modulo `phases`), and send within the windows."""
        ended = []
        sent_before = self.counters.tokens
        for stream in self.streams.values():
            if stream.slot % phases != phase:
                continue
            if stream.made < stream.end:
                stream.made += 1
            until = min(stream.made, stream.window)
            if until == stream.sent:
                self.counters.stalls += 1
                continue
            if until == stream.sent + 1:
                ids = token_at(stream.sent)
            else:
                ids = b"".join(token_at(position) for position in range(stream.sent, until))
            outbox.tokens(stream.slot, stream.sent, ids)
            self.counters.tokens += until - stream.sent
            stream.sent = until
            if until == stream.end:
                ended.append(stream)
        if self.counters.tokens != sent_before:
            self.counters.frames += 1
        for stream in ended:
            outbox.finish(stream.slot, stream.end, pb.Finish.REASON_LENGTH)
            del self.streams[stream.slot]
