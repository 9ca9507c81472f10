"""Paced streams: what a fake engine sends."""

from __future__ import annotations

import random

from bench.pacing import Counters, PacedStreams, token_at, token_id_at
from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.token_log import admit
from kvmesh.attach.v1 import attach_pb2 as pb


def take_rows(outbox: DownwardOutbox) -> tuple[list[frames.Row], pb.AttachResponse]:
    """Take what waits as rows and message."""
    message = outbox.take(0.0) or pb.AttachResponse()
    return list(frames.rows(message.frame)), message


def test_streams_deliver_every_position_once_below_the_window() -> None:
    """Positions of a stream are complete, in order, in the window, and end in one finish.

    This holds for any order of window updates.
    """
    for seed in range(50):
        draw = random.Random(seed)
        counters, outbox = Counters(), DownwardOutbox()
        streams = PacedStreams(counters)
        ends = {slot: draw.randrange(2, 40) for slot in range(1, draw.randrange(2, 9))}
        window = dict.fromkeys(ends, 1)
        have = dict.fromkeys(ends, 1)
        finished: list[int] = []
        for slot, end in ends.items():
            streams.start(slot, 1, end, 1)
        for _ in range(2000):
            if len(finished) == len(ends):
                break
            for slot in ends:
                if draw.random() < 0.3:
                    window[slot] += draw.randrange(1, 8)
                    streams.grant(slot, window[slot])
            streams.step(outbox)
            rows, message = take_rows(outbox)
            for row in rows:
                assert admit(row, have[row.slot]) == row, f"seed={seed}"
                assert row.token_ids == b"".join(token_at(row.position + i) for i in range(row.count)), (
                    f"seed={seed}"
                )
                have[row.slot] += row.count
                assert have[row.slot] <= window[row.slot], f"seed={seed}"
            finished += [finish.slot for finish in message.finishes]
        assert sorted(finished) == sorted(ends), f"seed={seed}"
        assert have == ends, f"seed={seed}"
        assert counters.tokens == sum(ends.values()) - len(ends), f"seed={seed}"
        assert not streams.streams, f"seed={seed}"


def test_phases_share_the_streams() -> None:
    """With two phases a step moves the even or the odd slots, and two steps move all."""
    streams, outbox = PacedStreams(Counters()), DownwardOutbox()
    for slot in range(1, 6):
        streams.start(slot, 0, 10, 10)
    streams.step(outbox, 0, 2)
    assert {row.slot for row in take_rows(outbox)[0]} == {2, 4}
    streams.step(outbox, 1, 2)
    assert {row.slot for row in take_rows(outbox)[0]} == {1, 3, 5}


def test_tokens_have_a_number_and_bytes() -> None:
    """The number of a paced token is what its bytes say."""
    assert frames.pack_ids([token_id_at(17)]) == token_at(17)
