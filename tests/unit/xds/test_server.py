"""Streams of clients at the server: their region, refusals, limits, and slow readers. The calls are those of a test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from controlplane.xds import server as module
from controlplane.xds.publication import Publication
from controlplane.xds.resource_set import CLUSTER, ENDPOINTS, TYPES
from controlplane.xds.server import AdsServer
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.request_reader import RequestReader
from kvmesh.server import SERVER_OPTIONS
from tests.patience import patience
from tests.unit.xds.topologies import EU_AND_US, region, schema, topology

REQUEST = "envoy.service.discovery.v3.DiscoveryRequest"
PING_MS = 5_000
"""Shortest keepalive time of docs/xds.md."""


class Stream:
    """One call: the test puts requests in, and takes answers out."""

    peer = "ipv4:127.0.0.1:1"
    metadata: Mapping[str, str] = {}
    identities: Sequence[str] = ()

    def __init__(self, server: AdsServer, caller_region: str = "eu") -> None:
        self.is_slow = False
        self._region = caller_region
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self.serving = asyncio.create_task(server.serve(self))

    def remaining_s(self) -> float | None:
        return None

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        raise AssertionError("the server sets no trailers")

    async def read(self) -> Any:
        return await self._requests.get()

    def try_write(self, message: object) -> bool:
        return False

    async def write(self, message: Any) -> None:
        if self.is_slow:
            await asyncio.Event().wait()
        self._answers.put_nowait(message)

    def ask(self, kind: str, nonce: str = "", error: str = "", names: Sequence[str] = ("kvmesh",)) -> None:
        """Send a request of the client."""
        fields: dict[str, Any] = {"typeUrl": kind, "resourceNames": names, "responseNonce": nonce}
        fields["node"] = {"id": "a\nclient", "locality": {"region": self._region}}
        if error:
            fields["errorDetail"] = {"message": error}
        self._requests.put_nowait(schema().build(REQUEST, fields))

    def half_close(self) -> None:
        """End the requests."""
        self._requests.put_nowait(None)

    async def answer(self) -> Any:
        """Return the next answer, which must come soon."""
        async with patience(5):
            return await self._answers.get()

    async def ended(self) -> None:
        """Wait for the end of the call. Raises its error."""
        async with patience(5):
            await self.serving


def made() -> AdsServer:
    """Return a server with two regions in force."""
    clock = MonotonicClock()
    server = AdsServer(schema(), Publication(schema(), "eu"), RequestReader(1 << 20, clock=clock), clock)
    server.publish(EU_AND_US)
    return server


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with patience(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize(("caller", "first"), [("us", "us"), ("eu", "eu"), ("moon", "eu")])
async def test_a_client_gets_the_resources_of_its_region(caller: str, first: str) -> None:
    """By the locality of its node."""
    stream = Stream(made(), caller)
    stream.ask(ENDPOINTS)
    (resource,) = (await stream.answer()).resources
    assert schema().unpack(resource).endpoints[0].locality.region == first
    stream.half_close()
    await stream.ended()


async def test_a_change_reaches_all_clients() -> None:
    """Each in its own order of regions."""
    server = made()
    streams = [Stream(server, caller) for caller in ("eu", "us")]
    for stream in streams:
        stream.ask(ENDPOINTS)
        await stream.answer()
    assert len(server) == 2
    assert server.publish(topology(region("eu", "10.9.0.1:1"), region("us", "10.8.0.1:1")))
    for stream, expected in zip(streams, ("10.9.0.1", "10.8.0.1"), strict=True):
        (resource,) = (await stream.answer()).resources
        (one,) = schema().unpack(resource).endpoints[0].lb_endpoints
        assert one.endpoint.address.socket_address.address == expected
        stream.half_close()
        await stream.ended()
    assert len(server) == 0


async def test_refusals_are_counted_and_logged_once_a_version(caplog: pytest.LogCaptureFixture) -> None:
    """However many clients refuse it. Their texts cannot break a log line."""
    server = made()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            stream = Stream(server)
            stream.ask(CLUSTER)
            answer = await stream.answer()
            stream.ask(CLUSTER, answer.nonce, "a bad\ncluster")
            stream.half_close()
            await stream.ended()
    assert server.nacks == {"cluster": 2, "endpoints": 0, "listener": 0, "routes": 0}
    (record,) = caplog.records
    text = record.getMessage()
    assert "a bad?cluster" in text and "a?client" in text and "\n" not in text
    assert answer.version_info in text


async def test_a_client_that_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients go on."""
    monkeypatch.setattr(module, "SLOW_S", 0.05)
    server = made()
    stream, other = Stream(server), Stream(server)
    stream.is_slow = True
    for each in (stream, other):
        each.ask(CLUSTER)
    await other.answer()
    with pytest.raises(MeshError) as error:
        await stream.ended()
    assert error.value.reason == "SLOW_READER"
    assert (server.cut_total, len(server)) == (1, 1)
    other.half_close()
    await other.ended()


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one is refused with the limit."""
    monkeypatch.setattr(module, "STREAMS_MAX", 1)
    server = made()
    first, second = Stream(server), Stream(server)
    first.ask(CLUSTER)
    await first.answer()
    second.ask(CLUSTER)
    with pytest.raises(MeshError) as error:
        await second.ended()
    assert (error.value.reason, server.refused_total) == ("CALLS_FULL", 1)
    first.half_close()
    await first.ended()


async def test_too_many_names_are_refused() -> None:
    """With the field, the number and the range."""
    stream = Stream(made())
    stream.ask(CLUSTER, names=[f"n{number}" for number in range(65)])
    with pytest.raises(MeshError, match="65 names") as error:
        await stream.ended()
    assert error.value.reason == "FIELD_OUT_OF_RANGE"


async def test_a_stop_ends_all_streams_and_refuses_new_ones() -> None:
    """Their clients go to another server."""
    server = made()
    stream = Stream(server)
    stream.ask(CLUSTER)
    await stream.answer()
    await server.stop()
    await stream.ended()
    late = Stream(server)
    late.ask(CLUSTER)
    await late.ended()
    assert len(server) == 0


async def test_a_client_waits_for_the_first_good_topology() -> None:
    """It gets no empty answer before."""
    clock = MonotonicClock()
    server = AdsServer(schema(), Publication(schema(), "eu"), RequestReader(1 << 20, clock=clock), clock)
    stream = Stream(server)
    for kind in TYPES:
        stream.ask(kind)
    await until(lambda: len(server) == 1)
    assert not server.publish(topology(region("eu")))
    assert server.publish(EU_AND_US)
    assert [(await stream.answer()).type_url for _ in TYPES] == list(TYPES)
    stream.half_close()
    await stream.ended()


def test_servers_permit_the_keepalive_of_the_clients() -> None:
    """A server that does not would end their connections with too_many_pings."""
    options = dict(SERVER_OPTIONS)
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] <= PING_MS
    assert options["grpc.http2.max_ping_strikes"] == 0
