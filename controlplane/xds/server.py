"""The Aggregated Discovery Service: the streams to gRPC clients and Envoy. `stream` decides what is sent.

Each stream has one task that reads and one that writes. Requests are paced, and a client that takes no answer for SLOW_S is
cut off. Before the first good topology, streams are open and wait: an empty answer would end all calls of their clients.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import grpc

from controlplane.pace import Pace
from controlplane.xds.publication import Publication
from controlplane.xds.resource_set import TYPES
from controlplane.xds.schema import TYPE_PREFIX, Schema
from controlplane.xds.stream import NAMES_MAX, AdsStream, Answer, Nack, Request
from controlplane.xds.topology import Topology
from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.request_reader import RequestReader

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "envoy.service.discovery.v3.AggregatedDiscoveryService"
METHOD: Final = "StreamAggregatedResources"

STREAMS_MAX: Final = 4096
"""Open streams. A further one is refused with CALLS_FULL."""

SLOW_S: Final = 10.0
"""A client that does not take an answer within this time is cut off. It reconnects and gets the latest answers."""

TEXT_MAX: Final = 300
"""Characters of a client's text, such as the reason of a refusal, in a log line."""

AdsCall = Call[Any, Any]


class ClientCutOff(Exception):
    """The client took no answer in time. The text is the reason."""


class _Client:
    """One open stream. Its writer waits on `news`."""

    def __init__(self, region: str, name: str) -> None:
        self.region = region
        self.name = name
        self.stream = AdsStream()
        self.news = asyncio.Event()


class AdsServer:
    """See the module."""

    def __init__(self, schema: Schema, publication: Publication, reader: RequestReader, clock: Clock) -> None:
        self.nacks: dict[str, int] = dict.fromkeys(map(kind_of, TYPES), 0)
        """Refused answers by kind of resource (see `kind_of`)."""
        self.answers_total = 0
        self.cut_total = 0
        """Streams that were cut off, because the client took no answer."""
        self.refused_total = 0
        """Streams that were refused, because STREAMS_MAX are open."""
        self._request = schema.message("envoy.service.discovery.v3.DiscoveryRequest")
        self._response: Any = schema.message("envoy.service.discovery.v3.DiscoveryResponse")
        self._publication = publication
        self._reader = reader
        self._clock = clock
        self._clients: set[_Client] = set()
        self._stopping = asyncio.Event()
        self._logged: dict[str, str] = {}
        """Version of the last refusal in the log, by type."""

    def __len__(self) -> int:
        return len(self._clients)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._handle,
            request_deserializer=self._request.FromString,
            response_serializer=self._response.SerializeToString,
        )
        server.add_registered_method_handlers(SERVICE_NAME, {METHOD: handler})  # type: ignore[attr-defined]  # not in the stubs

    def publish(self, topology: Topology) -> bool:
        """Offer `topology`, and send what has changed to all clients. Return True if it was put in force."""
        if not self._publication.offer(topology):
            return False
        for client in self._clients:
            self._renew(client)
        return True

    async def stop(self) -> None:
        """End all streams, so that their clients go to another server at once. No stream is opened from now on."""
        self._stopping.set()
        for client in self._clients:
            client.news.set()

    async def serve(self, call: AdsCall) -> None:
        """Serve one stream until it ends. Raises MeshError."""
        first = await self._reader.message(call.read, (call.peer,))
        if first is None or self._stopping.is_set():
            return
        if len(self._clients) >= STREAMS_MAX:
            self.refused_total += 1
            raise MeshError(
                "CALLS_FULL",
                f"{STREAMS_MAX} streams are open already",
                {"limit": str(STREAMS_MAX)},
                retry_after_s=1.0,
            )
        client = _Client(first.node.locality.region, f"{_shown(first.node.id)} ({call.peer})")
        self._clients.add(client)
        reading = asyncio.create_task(self._read(call, client, first), name="ads-read")
        writing = asyncio.create_task(self._write(call, client), name="ads-write")
        try:
            self._renew(client)
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            self._raise_of([error for task in done if (error := task.exception()) is not None], client)
        finally:
            self._clients.discard(client)
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _handle(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await self.serve(GrpcCall(context))

    def _renew(self, client: _Client) -> None:
        resources = self._publication.of(client.region)
        if resources is not None:
            client.stream.publish(resources)
            client.news.set()

    def _raise_of(self, errors: list[BaseException], client: _Client) -> None:
        """Raise the first error that the client must see; log the others."""
        for error in errors:
            if isinstance(error, MeshError):
                raise error
            if isinstance(error, ClientCutOff):
                self.cut_total += 1
                log.warning("the stream of %s is cut off: %s", client.name, error)
                raise MeshError("SLOW_READER", str(error))
            if not isinstance(error, (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError)):
                raise error

    async def _read(self, call: AdsCall, client: _Client, first: Any) -> None:
        pace = Pace(self._clock.now_s())
        message = first
        while message is not None:
            nack = client.stream.on_request(_request_of(message))
            if nack is not None:
                self._count(nack, client)
            client.news.set()
            delay_s = pace.delay_s(message.ByteSize(), self._clock.now_s())
            if delay_s:
                await asyncio.sleep(delay_s)
            message = await call.read()

    async def _write(self, call: AdsCall, client: _Client) -> None:
        while not self._stopping.is_set():
            await client.news.wait()
            client.news.clear()
            while (answer := client.stream.take()) is not None:
                try:
                    async with asyncio.timeout(SLOW_S):
                        await call.write(self._message(answer))
                except TimeoutError:
                    raise ClientCutOff(f"it took no answer for {SLOW_S:g} s") from None
                self.answers_total += 1

    def _message(self, answer: Answer) -> Any:
        message = self._response(version_info=answer.version, type_url=answer.type_url, nonce=answer.nonce)
        for resource in answer.resources:
            message.resources.add(type_url=answer.type_url, value=resource)
        return message

    def _count(self, nack: Nack, client: _Client) -> None:
        self.nacks[kind_of(nack.type_url)] += 1
        if self._logged.get(nack.type_url) != nack.version:  # one line, however many clients refuse it
            self._logged[nack.type_url] = nack.version
            log.error(
                "%s refuses version %s of %s: %s",
                client.name,
                nack.version,
                kind_of(nack.type_url),
                _shown(nack.error),
            )


def kind_of(type_url: str) -> str:
    """Return the last word of a type's name, as metrics and logs name it: "cluster", "listener"."""
    name = type_url.removeprefix(TYPE_PREFIX).rpartition(".")[2]
    return {"ClusterLoadAssignment": "endpoints", "RouteConfiguration": "routes"}.get(name, name.lower())


def _request_of(message: Any) -> Request:
    """Return the request in `message`. Raises MeshError if it names more than NAMES_MAX resources."""
    if len(message.resource_names) > NAMES_MAX:
        found = f"{len(message.resource_names)} names"
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("resource_names", found, f"up to {NAMES_MAX} names")])
    error = message.error_detail.message if message.HasField("error_detail") else None
    return Request(message.type_url, frozenset(message.resource_names), message.response_nonce, error)


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:TEXT_MAX])
