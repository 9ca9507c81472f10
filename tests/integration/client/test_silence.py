"""The client's failure detector, with frontends that hang, are slow, refuse, or are cut off: real connections, scripted
responses.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.client import Client, DeadlinePassed, MeshUnavailable, RetryPolicy
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.certificates import MESH, Folder
from tests.integration.client.scripted_frontend import IDS, ScriptedFrontend, begin, scripted, stalls, well
from tests.integration.harness import until
from tests.patience import patience, quiet_s

RETRY_POLICY = RetryPolicy(probe_after_s=0.4, probe_timeout_s=0.8)
"""A little shorter than the defaults."""


async def first(client: Client, frontend: ScriptedFrontend, tokens: int = 0) -> Any:
    """Return an answer that was first sent to `frontend`, once `tokens` tokens have arrived."""
    while True:
        stream = client.generate("x", deadline_s=20)
        reading = asyncio.create_task(stream.all())
        while not reading.done():
            await asyncio.sleep(0.005)
            if frontend.requests and len(stream.ids) >= tokens:
                return reading
        await reading


@pytest.mark.parametrize("after", [-1, 0, 4])
async def test_a_frontend_with_a_hanging_event_loop_is_left(after: int) -> None:
    """Health checks get no response: its streams continue elsewhere, its calls are cancelled, new requests avoid it."""
    async with AsyncExitStack() as stack:
        hung = await stack.enter_async_context(scripted(stalls(after, hangs=True)))
        good = await stack.enter_async_context(scripted(well))
        async with Client([hung.address, good.address], retry_policy=RETRY_POLICY) as client:
            reading = await first(client, hung)
            began_s = quiet_s()
            answer = await reading
            assert quiet_s() - began_s < 5
            assert answer.ids == IDS and answer.text == "x" * len(IDS)
            assert answer.resumes == (after >= 0)
            assert good.requests[-1].idempotency_key == hung.requests[0].idempotency_key != ""
            assert list(good.requests[-1].options.resume.received_token_ids) == IDS[: max(0, after)]
            await until(lambda: hung.cancelled == 1, 5, "the hung call is cancelled")
            seen = len(hung.requests)
            for _ in range(5):
                await client.generate("x").all()
            assert len(hung.requests) == seen
            hung.is_hung, hung.script = False, well
            async with patience(20):
                while len(hung.requests) == seen:
                    await client.generate("x").all()
                    await asyncio.sleep(0.02)


async def test_a_slow_model_is_waited_for() -> None:
    """A frontend with a silent stream and an answered health check is kept."""

    async def slow(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
        await begin(request, context, 3)
        await until(lambda: frontend.checks >= 3, 20, "asked three times")
        have = 3
        await context.write(
            pb.GenerateResponse(tokens=pb.Tokens(ids=IDS[have:], text="x" * 7, position=have))
        )
        await context.write(
            pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(output_token_count=len(IDS))))
        )

    async with (
        scripted(slow) as frontend,
        scripted(slow) as other,
        Client([frontend.address, other.address], retry_policy=RETRY_POLICY) as client,
    ):
        answer = await client.generate("x").all()
        assert answer.ids == IDS and (answer.sends, answer.resumes) == (1, 0)


class Cable:
    """A connection between client and frontend that can be cut: later bytes are dropped, and neither end gets an error."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.is_cut = False
        self.address = ""

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if not self.is_cut:
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes of one connection."""
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        except OSError:
            pass
        finally:
            writer.close()
            there_writer.close()


@asynccontextmanager
async def cabled(frontend: ScriptedFrontend) -> AsyncIterator[Cable]:
    """Yield the address of a cable to `frontend`."""
    cable = Cable(frontend.address)
    server = await asyncio.start_server(cable.serve, "127.0.0.1", 0)
    cable.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cable
    finally:
        server.close()


async def test_an_unreachable_frontend_is_left() -> None:
    """Neither reset nor response: detected like a frozen frontend."""
    async with AsyncExitStack() as stack:
        far = await stack.enter_async_context(scripted(stalls(4, hangs=False)))
        good = await stack.enter_async_context(scripted(well))
        cable = await stack.enter_async_context(cabled(far))
        client = await stack.enter_async_context(
            Client([cable.address, good.address], retry_policy=RETRY_POLICY)
        )
        reading = await first(client, far, tokens=4)
        cable.is_cut = True
        began_s = quiet_s()
        answer = await reading
        assert quiet_s() - began_s < 5
        assert answer.ids == IDS and answer.resumes == 1


async def test_one_deadline_holds_over_all_sends() -> None:
    """The deadline keeps running while the stream moves between frontends; the error carries the tokens received."""
    sends = 0

    async def breaks(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
        nonlocal sends
        sends += 1
        await begin(request, context, 1)
        if sends == 4:  # the deadline passes during a send, not between two
            await asyncio.Event().wait()
        raise MeshError("DRAINING", "going down", retry_after_s=0.1)

    async with (
        scripted(breaks) as one,
        scripted(breaks) as other,
        Client([one.address, other.address]) as client,
    ):
        answer, loop = client.generate("x", deadline_s=2.5), asyncio.get_running_loop()
        began_s, quiet_began_s = loop.time(), quiet_s()
        with pytest.raises(DeadlinePassed) as caught:
            await answer.all()
        assert loop.time() - began_s > 2.0 and quiet_s() - quiet_began_s < 4.0
        assert sends == 4
        assert caught.value.ids == answer.ids == IDS[: len(answer.ids)] != []
        assert caught.value.resume is not None


async def test_cancelling_the_reader_cancels_the_call() -> None:
    """The frontend sees the cancellation at once; the same for a reader that leaves its loop."""
    async with scripted(stalls(4, hangs=False)) as frontend, Client([frontend.address]) as client:

        async def read() -> None:
            async for _ in client.generate("x"):
                pass

        reading = asyncio.create_task(read())
        await until(lambda: len(frontend.requests) == 1, 5, "sent")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: frontend.cancelled == 1, 5, "cancelled")
        async with client.generate("x") as answer:
            assert (await anext(answer)).ids == tuple(IDS[:4])
        await until(lambda: frontend.cancelled == 2, 5, "left")


async def test_an_unavailable_mesh_raises_a_typed_error(free_port: int) -> None:
    """No process listens: a bounded number of sends, and an error that says how to proceed."""
    retry_policy = RetryPolicy(sends_max=4)
    async with Client([f"127.0.0.1:{free_port}"], retry_policy=retry_policy) as client:
        answer = client.generate("x", deadline_s=30)
        with pytest.raises(MeshUnavailable) as caught:
            await answer.all()
        assert (answer.sends, caught.value.reason, caught.value.ids) == (4, "FRONTEND_LOST", [])


async def test_silent_streams_share_one_health_check() -> None:
    """There is one health check per frontend, not one per stream."""
    async with scripted(stalls(4, hangs=False)) as frontend:
        async with Client([frontend.address], retry_policy=RETRY_POLICY) as client:
            readings = [asyncio.create_task(client.generate("x", deadline_s=20).all()) for _ in range(50)]
            await until(lambda: frontend.checks >= 3, 20, "asked")
            assert len(frontend.requests) == 50 and frontend.checks <= 4
            for reading in readings:
                reading.cancel()
            await asyncio.gather(*readings, return_exceptions=True)
        await until(lambda: frontend.cancelled == 50, 10, "all were cancelled")


async def test_a_frontend_under_tls_is_reached_by_its_authority(tmp_path: Path) -> None:
    """Credentials are an argument; without them no request is sent to the frontend."""
    files = Folder(tmp_path).files("frontend")
    key, chain = Path(files.key).read_bytes(), Path(files.certificate).read_bytes()
    credentials = grpc.ssl_channel_credentials(Path(files.authority).read_bytes())
    name = (("grpc.ssl_target_name_override", f"frontend.{MESH}.internal"),)
    async with scripted(well, grpc.ssl_server_credentials([(key, chain)])) as frontend:
        async with Client([frontend.address], credentials=credentials, channel_options=name) as client:
            assert (await client.generate("x").all()).ids == IDS
        async with Client([frontend.address], retry_policy=RetryPolicy(sends_max=2)) as client:
            with pytest.raises(MeshUnavailable):
                await client.generate("x", deadline_s=10).all()


def test_importing_the_client_loads_no_service() -> None:
    """Applications import it: no Redis, no tokenizer, no server."""
    program = "import kvmesh.client, sys; print(sorted({each.partition('.')[0] for each in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout
    for heavy in ("redis", "uvloop", "numpy", "tokenizers", "typer", "opentelemetry", "services", "msgspec"):
        assert f"'{heavy}'" not in loaded
