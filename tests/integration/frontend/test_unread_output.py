"""Output that a client does not read: the charge is the output handed to the transport, or computed behind a closed
window.

The client speaks HTTP/2 by hand, so that its flow-control window ends at any byte of any message.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.accounts.settlement import Report
from services.frontend.requests import charge
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.surface.service import SERVICE_NAME
from tests.integration.frontend.calls import asking
from tests.integration.frontend.conftest import Serving, until
from tests.integration.frontend.scripted_router import Pool
from tests.raw_frames import framed
from tests.raw_http2 import RawConnection, RawStream

GENERATE = f"/{SERVICE_NAME}/Generate"
BATCH = 96


@pytest.fixture
def reports(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """Settlements of the frontend, in the order in which its streams end."""
    found: list[Report] = []
    add = serving.frontend.accounts.settlements.add

    def note(report: Report, *rest: object) -> None:
        found.append(report)
        add(report, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(serving.frontend.accounts.settlements, "add", note)
    return found


async def begin(connection: RawConnection, count: int) -> RawStream:
    """Request `count` tokens."""
    stream = connection.call(GENERATE)
    await stream.send_message(asking(count))
    return stream


async def piled_up(serving: Serving, count: int) -> None:
    """Wait until `count` requests have all tokens that their flow-control windows allow."""

    def full() -> bool:
        live = serving.frontend.core.admitted.serving
        return sum(len(request.progress.ids) == FLOW_CONTROL_WINDOW for request in live) == count

    await until(full, "tokens pile up", 20)


async def open_for(stream: RawStream, size: int) -> None:
    """Open the window of `stream` by `size` bytes and read them."""
    if size:
        stream.grant(size, connection=False)
    await stream.until(lambda: stream.byte_count == size)


async def reset(stream: RawStream, reports: list[Report]) -> Report:
    """Reset `stream`; return its charge."""
    settled = len(reports)
    stream.reset()
    await until(lambda: len(reports) > settled, "the stream is settled")
    return reports[-1]


class Answer:
    """The first two messages of an answer on the wire: `started`, and all tokens that piled up after it."""

    def __init__(self, messages: list[bytes]) -> None:
        started, tokens = messages
        self.ids = list(pb.GenerateResponse.FromString(tokens).tokens.ids)
        self.started_bytes, self.size = len(framed(started)), len(framed(started)) + len(framed(tokens))
        sizes = [1 if each < 0x80 else 2 for each in self.ids]
        assert max(self.ids) < 0x4000
        packed = pb.Tokens(ids=self.ids).SerializeToString()[-sum(sizes) :]
        start = self.started_bytes + framed(tokens).index(packed)
        self._ends = [start + end for end in accumulate(sizes)]

    def ids_in(self, stream: RawStream) -> int:
        """Return how many token ids are complete in the bytes that `stream` has received.

        The resume token in `started` is a few bytes longer in some answers than in others.
        """
        if not stream.messages:
            return 0
        longer = len(framed(stream.messages[0])) - self.started_bytes
        return bisect_right(self._ends, stream.byte_count - longer)


async def test_a_reset_is_charged_the_received_output_and_at_most_a_window_more(
    serving: Serving, pool: Pool, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens pile up behind a closed window. The window opens for n bytes, these are read, the stream is reset; for
    every n.
    """
    monkeypatch.setattr(charge, "CLOSED_S", 1e9)  # however busy the machine is
    came = charged = 0
    async with RawConnection.connect(serving.address, stream_window=0, connection_window=1 << 24) as client:
        probe = await begin(client, 100)
        await piled_up(serving, 1)
        probe.grant(1 << 16)
        await probe.until(lambda: len(probe.messages) >= 2)
        answer = Answer(probe.messages[:2])
        assert len(answer.ids) == FLOW_CONTROL_WINDOW
        await probe.ended()
        await until(lambda: len(reports) == 1, "the probe is settled")
        for first in range(0, answer.size + 1, BATCH):
            opened = range(first, min(first + BATCH, answer.size + 1))
            streams = [await begin(client, 100) for _ in opened]
            await piled_up(serving, len(streams))
            for size, stream in zip(opened, streams, strict=True):
                await open_for(stream, size)
                paid = (await reset(stream, reports)).output_tokens
                received = answer.ids_in(stream)
                whole = FLOW_CONTROL_WINDOW if len(stream.messages) > 1 else 0
                assert received <= paid <= whole + FLOW_CONTROL_WINDOW, (
                    f"{received} of {size} bytes, {paid} charged"
                )
                came, charged = came + received, charged + paid
    assert came <= charged
    await serving.until_empty()


async def test_a_closed_window_is_charged_the_computed_output(
    serving: Serving, pool: Pool, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed from the first byte, or after the first message: the computed output is charged, read or not."""
    async with RawConnection.connect(serving.address, stream_window=0, connection_window=1 << 24) as client:
        for granted, closed_s, paid in ((0, 1e9, 0), (0, 0.0, 300), (200, 0.0, 300)):
            monkeypatch.setattr(charge, "CLOSED_S", closed_s)
            stream = await begin(client, 300)
            await until(lambda: bool(pool.runs) and pool.runs[0].log.end == 300, "all is computed")
            (request,) = serving.frontend.core.admitted.serving
            await until(lambda: request.progress.reach.computed == 300, "decode reported it")  # noqa: B023  # awaited here
            await open_for(stream, granted)
            report = await reset(stream, reports)
            assert (report.prompt_tokens, report.output_tokens) == (1, paid)
            await until(lambda: not pool.runs, "the engine is told")
