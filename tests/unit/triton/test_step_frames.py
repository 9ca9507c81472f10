"""The codec of step frames: the engine's encoder, the mesh's decoder and a slow twin agree, and bad bytes are refused."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest

from engines.contract import step_frames as encoder
from engines.contract.outputs import PerfMetrics, RequestOutput
from engines.contract.step_frames import SlotProgress
from kvmesh.triton import step_frames as decoder
from kvmesh.triton.errors import EngineError
from tests.unit.triton.slow_frames import Frame, Tokens, encoded


def single(value: float) -> float:
    """Return `value` as a float of four bytes."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def drawn(chance: random.Random) -> tuple[list[tuple[SlotProgress, RequestOutput]], Frame]:
    """Return random outputs of an engine, and the frame that they are."""
    outputs: list[tuple[SlotProgress, RequestOutput]] = []
    frame = Frame(chance.getrandbits(64))
    asks_more = chance.random() < 0.5
    for slot in chance.sample(range(2**32), chance.choice((0, 1, 2, 9))):
        progress = SlotProgress(
            slot,
            has_log_probs=asks_more and chance.random() < 0.5,
            has_perf=chance.random() < 0.5,
            position=chance.randrange(1000),
            is_started=chance.random() < 0.7,
        )
        count = chance.choice((0, 1, 1, 1, 5))
        ids = [chance.randrange(-(2**31), 2**31) for _ in range(count)]
        values = [single(-chance.random()) for _ in ids]
        width = chance.choice((0, 3)) if asks_more else 0
        output = RequestOutput(ids, values, is_final=chance.random() < 0.3)
        output.is_complete = output.is_final and chance.random() < 0.5
        if width and ids:
            output.top_ids = [[chance.randrange(-1, 99) for _ in range(width)] for _ in ids]
            output.top_log_probs = [[single(-chance.random()) for _ in range(width)] for _ in ids]
        if chance.random() < 0.3:
            output.perf = PerfMetrics(9, chance.randrange(9), 0, 0, 0, 0)
        if chance.random() < 0.3:
            output.handoff = chance.randbytes(chance.randrange(40))
        if output.is_final and chance.random() < 0.3:
            output.error = "Wärter" * chance.randrange(3)
        outputs.append((progress, output))
        if not progress.is_started and (ids or output.is_complete):
            reused = output.perf.reused_blocks if output.perf is not None and progress.has_perf else 0
            frame.first.append((slot, reused, output.handoff or b""))
        if ids:
            beside = [
                list(zip(top, logs, strict=True))
                for top, logs in zip(output.top_ids, output.top_log_probs, strict=True)
            ]
            logs = values if progress.has_log_probs else None
            frame.tokens.append(Tokens(slot, progress.position, ids, logs, beside))
        if output.error is not None:
            frame.errors.append((slot, output.error))
        elif output.is_final:
            frame.final.append((slot, output.is_complete))
    return outputs, frame


def decoded(raw: bytes) -> Frame:
    """Return what the mesh reads, in the twin's form."""
    found = decoder.decode(raw)
    rows = []
    for row in found.tokens:
        width = len(row.alternatives) // len(row.token_ids)
        beside = [
            list(struct.iter_unpack("<if", row.alternatives[at : at + width]))
            for at in range(0, len(row.alternatives), width or 1)
        ]
        logs = list(row.log_probs) if row.log_probs else None
        rows.append(Tokens(row.slot, row.position, list(row.token_ids), logs, beside))
    return Frame(
        found.number,
        found.is_last,
        rows,
        [(row.slot, row.reused_blocks, row.handoff) for row in found.first],
        [(row.slot, row.is_complete) for row in found.final],
        [(row.slot, row.text) for row in found.errors],
    )


def test_encoder_decoder_and_twin_agree() -> None:
    """The engine's bytes are those of the slow twin, and the mesh reads the same rows from them."""
    chance = random.Random(1)
    for number in range(400):
        outputs, frame = drawn(chance)
        before = [progress.position for progress, _ in outputs]
        frame.is_last = number % 7 == 0
        raw = encoder.encode(frame.number, outputs, is_last=frame.is_last)
        assert raw == encoded(frame)
        assert decoded(raw) == frame
        for position, (progress, output) in zip(before, outputs, strict=True):
            assert progress.position == position + len(output.tokens)


def test_any_cut_or_longer_frame_is_refused() -> None:
    """A frame of a wrong length raises EngineError, wherever it is cut, and nothing else."""
    chance = random.Random(2)
    for _ in range(60):
        outputs, frame = drawn(chance)
        raw = encoder.encode(frame.number, outputs)
        for at in sorted(chance.sample(range(len(raw)), 8)):
            with pytest.raises(EngineError, match="step frame"):
                decoder.decode(raw[:at])
        with pytest.raises(EngineError, match="1 bytes behind its last row"):
            decoder.decode(raw + b"\0")


def test_random_bytes_never_raise_anything_else() -> None:
    """Changed bytes give other rows or EngineError. Counts of billions of rows allocate nothing."""
    chance = random.Random(3)
    for _ in range(300):
        outputs, frame = drawn(chance)
        raw = bytearray(encoder.encode(frame.number, outputs))
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        with suppress(EngineError):
            decoder.decode(bytes(raw))


def header(version: int = 1, flags: int = 0, reserved: int = 0, rows: int = 0, tokens: int = 0) -> bytes:
    """Return a header alone."""
    return struct.pack("<BBHQIIIII", version, flags, reserved, 1, rows, tokens, 0, 0, 0)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "has 0 bytes: allowed are 32 or more"),
        (header(version=2), "has version 2: allowed is 1"),
        (header(flags=4), "flags 0x4"),
        (header(reserved=1), "reserved bits 0x1"),
        (header(rows=65_537), "65537 token rows: allowed are 0..65536"),
        (header(rows=1), "slots needs 4 bytes, and 0 are left"),
        (header(rows=1, tokens=1) + struct.pack("<IIIi", 1, 0, 2, 7), "counts for 2 tokens: allowed is 1"),
    ],
    ids=["empty", "version", "flags", "reserved", "rows", "cut", "counts"],
)
def test_a_bad_field_is_named(raw: bytes, text: str) -> None:
    """The error names the field, its value and the allowed range."""
    with pytest.raises(EngineError, match=text):
        decoder.decode(raw)


def test_a_frame_of_the_most_rows_is_read() -> None:
    """65,536 rows are allowed: as many slots as a step stream may have."""
    outputs = [(SlotProgress(slot, is_started=True), RequestOutput([7])) for slot in range(encoder.ROWS_MAX)]
    found = decoder.decode(encoder.encode(1, outputs))
    assert len(found.tokens) == 65_536 == decoder.ROWS_MAX
    assert decoder.VERSION == encoder.VERSION
