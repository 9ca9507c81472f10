"""Clients that never read hold at most half of a decode replica's slots (bulkhead); all others are served meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.surface.service import SERVICE_NAME
from tests.integration.generation import generate_all, token_request
from tests.integration.harness import configure, running_mesh, until
from tests.integration.scraped import sample
from tests.raw_http2 import RawConnection, RawStream

pytestmark = pytest.mark.mesh

SLOTS, UNREAD = 8, 24
FIRST = 256
"""Bytes of the flow-control window: the first message of an answer and some tokens fit. Without its first message a
call has no status.
"""
LONG = 8_000
"""Number of tokens that take longer than the test."""


async def test_clients_that_never_read_leave_half_of_the_slots_to_others(tmp_path: Path) -> None:
    """24 such streams on 8 slots: every other call is answered, four of the streams stay, and continue once they are
    read.
    """
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.02, "kv_blocks": 8192, "max_sequence_tokens": LONG + 100},
        frontend={"max_output_tokens_max": LONG},
        prefill={"replicas": 1},
        decode={"replicas": 1, "slots_max": SLOTS},
    )
    async with running_mesh(config, tmp_path) as mesh:
        address = mesh.parts["frontend-0"].address
        async with RawConnection.connect(address, stream_window=FIRST, connection_window=1 << 24) as client:
            unread = [client.call(f"/{SERVICE_NAME}/Generate") for _ in range(UNREAD)]
            for number, stream in enumerate(unread):
                request = token_request([30 + number] * 20, max_output_tokens=LONG)
                await stream.send_message(request.SerializeToString())
            others = [token_request([100 + number] * 20, max_output_tokens=20) for number in range(12)]
            answers = await generate_all(mesh.client(), others, concurrency=4, timeout_s=10.0)
            assert [answer.error for answer in answers] == [None] * len(others)

            async def half_is_left() -> bool:
                held = await sample(mesh, "decode-0", "kvmesh_decode_slots")
                live = await sample(mesh, "frontend-0", "kvmesh_frontend_live_requests")
                return held == live == SLOTS / 2

            await until(half_is_left, 20, "the others gave up their slots, at decode and at the frontend")
            assert await sample(mesh, "decode-0", "kvmesh_decode_closed_window_slots") == SLOTS / 2
            assert (
                await sample(mesh, "decode-0", "kvmesh_decode_slow_reader_cuts_total") == UNREAD - SLOTS / 2
            )
            for stream in unread:
                stream.grant(1 << 20, connection=False)
            await client.until(lambda: sum(stream.has_ended for stream in unread) == UNREAD - SLOTS / 2)
            assert {stream.status for stream in unread if stream.has_ended} == {8}
            assert all(b"SLOW_READER" in stream.details for stream in unread if stream.has_ended)
            left = [stream for stream in unread if not stream.has_ended]
            await client.until(lambda: all(tokens_of(stream) > 2 * FLOW_CONTROL_WINDOW for stream in left))

            async def none_is_closed() -> bool:
                return await sample(mesh, "decode-0", "kvmesh_decode_closed_window_slots") == 0

            await until(none_is_closed, 10, "decode knows that they read")
            for stream in left:
                stream.reset()
            await client.ping()
        await mesh.idle(20)


def tokens_of(stream: RawStream) -> int:
    """Return the number of tokens received."""
    return sum(len(message.tokens.ids) for message in stream.decoded(pb.GenerateResponse.FromString))
