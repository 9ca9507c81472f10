"""A stock gRPC client that dials `xds:///kvmesh`, as a process: `python -m ...client`.

Bootstrap and resources belong to the whole process, so that each client is a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import control
from tests.patience import Patience, quiet_s

SERVICE: Final = "kvmesh.test.Backend"
TARGET: Final = "xds:///kvmesh"
PAUSE_S: Final = 0.01


class Client:
    """One channel and its streams."""

    def __init__(self, options: Mapping[str, Any], authority: bytes) -> None:
        """Dial. `authority`: of the frontends' certificates. Empty: without TLS."""
        self._options = options
        self._authority = authority
        self._streams: list[asyncio.Task[list[str]]] = []
        self._channel = self._dial(TARGET)

    def _dial(self, target: str) -> grpc.aio.Channel:
        options = list(self._options.items())
        if self._authority:
            return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(self._authority), options)
        return grpc.aio.insecure_channel(target, options)

    async def call(self, count: int, deadline_s: float, target: str) -> Mapping[str, Any]:
        """Make calls one after the other. Return their servers and errors, and the seconds of the slowest one.

        `target`: of a second channel. Empty: the first one.
        """
        channel = self._dial(target) if target else self._channel
        by: Counter[str] = Counter()
        slowest_s = 0.0
        for _ in range(count):
            began_s = time.monotonic()
            by[await self._name(channel, deadline_s)] += 1
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        return {"by": dict(by), "slowest_s": slowest_s}

    async def until(self, region: str, within_s: float) -> Mapping[str, Any]:
        """Call until a server of `region` answers. Return the seconds, and those of each error before."""
        began_s, bound = quiet_s(), Patience(within_s)
        errors: list[float] = []
        while not bound.is_over:
            found = await self._name(self._channel, within_s)
            if found.startswith(f"{region}-"):
                return {"seconds": quiet_s() - began_s, "errors": errors}
            if found.isupper():
                errors.append(quiet_s() - began_s)
            await asyncio.sleep(PAUSE_S)
        raise TimeoutError(f"no server of {region} answered within {within_s:g} s")

    async def open(self, count: int, messages: int) -> Mapping[str, Any]:
        """Open streams, and return once each has its first message."""
        method = self._channel.unary_stream(f"/{SERVICE}/Stream", None, None)  # raw bytes
        calls: list[Any] = [method(str(messages).encode(), timeout=60) for _ in range(count)]
        firsts = [(await call.read()).decode() for call in calls]
        self._streams = [
            asyncio.create_task(self._rest(call, first)) for call, first in zip(calls, firsts, strict=True)
        ]
        return {"by": Counter(firsts)}

    async def ends(self) -> Mapping[str, Any]:
        """Wait for the end of all streams. Return the messages of each."""
        return {"messages": [len(found) for found in await asyncio.gather(*self._streams)]}

    async def check(self, deadline_s: float) -> Mapping[str, Any]:
        """Return the health of the frontend that answers."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=deadline_s)
        return {"status": answer.status}

    async def _rest(self, call: Any, first: str) -> list[str]:
        found = [first]
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            found.append(message.decode())
        return found

    async def _name(self, channel: grpc.aio.Channel, timeout_s: float) -> str:
        """Return the name of the server that answers a call, or the status of the call."""
        try:
            method = channel.unary_unary(f"/{SERVICE}/Name", None, None)  # raw bytes
            answer: bytes = await method(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return answer.decode()


async def serve(bootstrap: str, options: str, authority: str = "") -> None:
    """Serve until stdin ends. `bootstrap` and `options`: JSON. `authority`: a file."""
    os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = bootstrap
    client = Client(json.loads(options), Path(authority).read_bytes() if authority else b"")
    await control.serve_commands(client.call, client.until, client.open, client.ends, client.check)


if __name__ == "__main__":
    control.main(serve, __doc__)
