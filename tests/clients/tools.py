"""Clients that do not understand the commands of `driver`: nghttp, h2load, reflection, and Triton's client."""

from __future__ import annotations

import asyncio
import re
import shutil
import struct
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import grpc
import numpy as np
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from bench.environments import Unavailable
from tests.clients import ticker
from tests.clients.cases import CHECK
from tests.clients.perf_analyzer import perf_analyzer
from tests.clients.site import Site
from tests.patience import wait_for

TOOL_S_MAX: Final = 60.0
H2LOAD_REQUESTS: Final = 2_000
SERVICE: Final = "kvmesh.inference.v1.InferenceService"
FIELDS: Final = ("-H", "content-type: application/grpc", "-H", "te: trailers")
_PREFIX: Final = struct.Struct(">BI")

Tool = Callable[[Site], Awaitable[str]]


async def nghttp(site: Site) -> str:
    """It gets a status with each answer: a call's, a refused method's, and that of a request that is no call."""
    body = site.fleet.folder / "empty-message"
    body.write_bytes(_PREFIX.pack(0, 0))
    url = f"http://{site.address()}"
    good = await output("nghttp", "-v", "-t", "20", "-d", str(body), *FIELDS, url + CHECK)
    assert "grpc-status: 0" in good, good
    padded = await output("nghttp", "-v", "-m", "20", "-b", "16", "-d", str(body), *FIELDS, url + CHECK)
    assert padded.count("grpc-status: 0") == 20, f"{padded.count('grpc-status: 0')} of 20 padded calls"
    unknown = await output("nghttp", "-v", "-d", str(body), *FIELDS, url + "/no.Service/Method")
    assert "grpc-status: 12" in unknown, unknown
    browser = await output("nghttp", "-v", url + "/")
    assert ":status: 405" in browser, browser
    return "22 calls, UNIMPLEMENTED, HTTP 405"


async def h2load(site: Site) -> str:
    """All of its calls succeed, on ten connections with 100 streams each, and on one with more than are allowed."""
    body = site.fleet.folder / "empty-message"
    body.write_bytes(_PREFIX.pack(0, 0))
    seen = []
    for connections, streams in (("10", "100"), ("1", "2000")):
        words = ("-n", str(H2LOAD_REQUESTS), "-c", connections, "-m", streams, "-d", str(body), *FIELDS)
        said = await output("h2load", *words, f"http://{site.address()}{CHECK}")
        found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", said)
        assert found, said
        assert found[1] == str(H2LOAD_REQUESTS), found[0]
        rate = re.search(r"([\d.]+) req/s", said)
        seen.append(f"{connections} x {streams}: {float(rate[1]) if rate else 0:.0f}/s")
    return f"{2 * H2LOAD_REQUESTS} calls; {', '.join(seen)}"


async def reflection(site: Site) -> str:
    """It lists the services, and finds the methods and messages of the API."""

    def look() -> str:
        with grpc.insecure_channel(site.address()) as channel:
            found = ProtoReflectionDescriptorDatabase(channel)
            services = sorted(found.get_services())
            file = found.FindFileContainingSymbol(SERVICE)
            methods = sorted(method.name for method in file.service[0].method)
        assert SERVICE in services, services
        assert "grpc.health.v1.Health" in services, services
        assert "Generate" in methods, methods
        return f"{len(services)} services, {len(methods)} methods"

    return await asyncio.to_thread(look)


async def triton(site: Site) -> str:
    """Triton's client finds a model, and its inference is right, in a call and in a stream."""
    address = site.tickers[0].address

    def ask() -> str:
        given = np.arange(16, dtype=np.int32)
        tensor = InferInput("INPUT", [16], "INT32")
        tensor.set_data_from_numpy(given)
        answers: list[object] = []
        with InferenceServerClient(address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready(ticker.MODEL)
            assert client.get_model_metadata(ticker.MODEL).versions == ["1"]
            try:
                client.get_model_metadata("größe")
            except InferenceServerException as error:
                assert error.status() == "StatusCode.NOT_FOUND", error.status()
                assert "größe" in error.message(), error.message()
            else:
                raise AssertionError("a model that is missing was found")
            for algorithm in (None, "gzip", "deflate"):
                result = client.infer(ticker.MODEL, [tensor], compression_algorithm=algorithm)
                assert (result.as_numpy("OUTPUT") == 2 * given).all()
            client.start_stream(lambda result, error: answers.append(error or result))
            for _ in range(5):
                client.async_stream_infer(ticker.MODEL, [tensor])
            client.stop_stream()
        assert len(answers) == 15, f"{len(answers)} of 15 answers of a stream"
        return "live, ready, metadata, infer (plain, gzip, deflate), stream"

    return await asyncio.to_thread(ask)


TOOLS: Final[Mapping[str, Tool]] = {
    "nghttp": nghttp,
    "h2load": h2load,
    "reflection": reflection,
    "tritonclient": triton,
    "perf_analyzer": perf_analyzer,
}


async def output(program: str, *words: str) -> str:
    """Return what a program prints. Raises Unavailable if it is not installed."""
    path = shutil.which(program)
    if path is None:
        raise Unavailable(f"{program} is missing (Debian: apt-get install nghttp2-client)")
    child = await asyncio.create_subprocess_exec(
        path, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = await wait_for(child.communicate(), TOOL_S_MAX)
    except TimeoutError:
        child.kill()
        await child.wait()
        raise AssertionError(f"{Path(path).name} did not end within {TOOL_S_MAX:g} s") from None
    return said.decode(errors="replace")
