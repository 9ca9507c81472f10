"""The cost of a refusal in the frontend: over gRPC, with a bare server as the floor, and in its own code alone.

The callers, the bare server and the frontend without gRPC are this module as a process. `part` selects one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import grpc

from bench import aims, control
from bench.generate_only import GenerateOnly
from bench.generation import bearer
from bench.processes import TEST_CORE, Fleet, Process
from bench.results import ScenarioResults
from bench.windows import Pace, measure
from kvmesh import config as configuration
from kvmesh.advertise import AS_LISTENED
from kvmesh.errors import MeshError, to_status
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.service_options import ServiceOptions
from services.frontend.assembly import Frontend
from services.frontend.surface import served_versions

CALLS = 32
"""Concurrent calls."""

FLOOR = "a server that refuses at once"
KEY = "kvm_bench"
TABLES: dict[str, dict[str, Any]] = {
    "tenants.bench": {"requests_per_min": 1.0},
    "keys.bench": {"tenant": "bench", "sha256": sha256(KEY.encode()).hexdigest()},
}
"""A tenant with a limit of one request a minute."""

CASES = {"unknown key": "kvm_unknown", "in-flight cap": KEY, "quota": KEY}
"""The caller's key, by case."""

OWN_BATCH = 500
PLACES = 8

TAKE_S = 0.5
"""Time in which a request uses up the quota."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        floor = fleet.start_ready("floor", __name__, TEST_CORE, part="floor")
        _run_case(results, pace, FLOOR, "", floor, _callers(fleet, floor))
    with Fleet() as fleet:
        fleet.configure(TABLES)
        frontend = fleet.service("frontend", "frontend-0")
        callers = _callers(fleet, frontend)
        for case in ("unknown key", "quota"):
            _run_case(results, pace, case, CASES[case], frontend, callers)
    with Fleet() as fleet:
        # One request waits for a router and fills the frontend: there is no router.
        fleet.configure({"frontend": {"max_live_requests": 1}})
        frontend = fleet.service("frontend", "frontend-0")
        _run_case(results, pace, "in-flight cap", CASES["in-flight cap"], frontend, _callers(fleet, frontend))
    with Fleet() as fleet:
        own = fleet.start_ready("own", __name__, TEST_CORE, part="own", target=fleet.redis())
        for case in CASES:
            spent_us = own.ask("measure", case=case, seconds=pace.window_s / 2)["us"]
            results.add(case, aims.OWN_REFUSAL, "us", spent_us)


def _callers(fleet: Fleet, server: Process) -> Process:
    return fleet.start_ready(f"callers-of-{server.name}", __name__, part="callers", target=server.address)


def _run_case(
    results: ScenarioResults, pace: Pace, case: str, key: str, server: Process, callers: Process
) -> None:
    callers.ask("open", calls=CALLS, key=key)
    time.sleep(pace.warm_s)
    window = measure(server, callers, pace.window_s)
    callers.ask("close")
    refused = window.counts["refused"]
    if not refused:
        results.problem("nothing was refused", case)
        return
    if window.counts["served"] > 0.01 * refused:
        results.problem(f"{window.counts['served']:.0f} requests were served", case)
    results.add(case, aims.PER_REFUSAL, "us", window.cpu_s / refused * 1e6)
    results.add(case, "refusals per second of CPU", "1/s", refused / window.cpu_s)
    results.add(case, "refusals per second", "1/s", refused / window.seconds)


def request() -> pb.GenerateRequest:
    """Return a small request."""
    return pb.GenerateRequest(
        text="A refusal must cost next to nothing.", limits=pb.Limits(max_output_tokens=16)
    )


class Callers:
    """Closed-loop load: some callers, each of which repeats its call once it is answered. Counts the answers."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._tasks: list[asyncio.Task[None]] = []
        self.refused = self.served = 0

    async def open(self, calls: int, key: str) -> None:
        """Start `calls` concurrent callers with `key`."""
        metadata = bearer(key)
        self._tasks = [asyncio.create_task(self._call(metadata)) for _ in range(calls)]

    async def close(self) -> None:
        """Stop all callers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def counters(self) -> Mapping[str, Any]:
        """Return the counters."""
        return {"refused": self.refused, "served": self.served}

    async def _call(self, metadata: Sequence[tuple[str, str]]) -> None:
        asked = request()
        while True:
            try:
                async for _ in self._stub.Generate(asked, metadata=metadata, timeout=10):
                    pass
                self.served += 1
            except grpc.aio.AioRpcError:
                self.refused += 1


class Refusing(GenerateOnly):
    """The floor: a server that refuses without reading the request."""

    async def Generate(  # type: ignore[override]  # named by the protocol; refuses instead of yielding
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        """Refuse."""
        await context.abort_with_status(to_status(MeshError("LIVE_REQUESTS_FULL", "full", retry_after_s=1.0)))


class OwnCall:
    """A call without gRPC. Implements Call."""

    identities: Sequence[str] = ()
    peer = "bench"

    def __init__(self, key: str, message: bytes) -> None:
        self.metadata: Mapping[str, str] = dict(bearer(key))
        self._message = message

    def remaining_s(self) -> float | None:
        """See Call."""
        return 30.0

    async def read(self) -> bytes | None:
        """See Call."""
        return self._message

    def try_write(self, message: object) -> bool:
        """See Call."""
        return False

    async def write(self, message: pb.GenerateResponse) -> None:
        """See Call."""

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        """See Call."""


class Own:
    """A frontend in this process, without gRPC and without a router. Its budgets are in the Redis at `redis_url`."""

    def __init__(self, redis_url: str) -> None:
        tables: dict[str, dict[str, Any]] = {"frontend": {"max_live_requests": PLACES}}
        for name, table in TABLES.items():
            kind, _, key = name.partition(".")
            tables.setdefault(kind, {})[key] = table
        config = configuration.build(tables)
        options = ServiceOptions(config, "bench", "127.0.0.1:0", redis_url, 0, AS_LISTENED)
        self._frontend = Frontend(options, served_versions.load(config))
        self._data = request().SerializeToString()

    async def measure(self, case: str, seconds: float) -> Mapping[str, Any]:
        """Refuse batches of OWN_BATCH calls for `seconds`.

        Return `us`, the CPU microseconds per refusal in the cheapest batch, and `reason`, that of the last refusal.
        """
        least_us = float("inf")
        self._frontend.core.admitted.reading = PLACES if case == "in-flight cap" else 0
        reason, key = "", CASES[case]
        taking = asyncio.create_task(self._refuse(key)) if case == "quota" else None
        await asyncio.sleep(TAKE_S)  # this request is admitted, and waits for a router in vain
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            before_ns = time.process_time_ns()
            for _ in range(OWN_BATCH):
                reason = await self._refuse(key)
            least_us = min(least_us, (time.process_time_ns() - before_ns) / 1e3 / OWN_BATCH)
        if taking is not None:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        return {"us": least_us, "reason": reason}

    async def _refuse(self, key: str) -> str:
        try:
            await self._frontend.service.serve(OwnCall(key, self._data))
        except MeshError as error:
            to_status(error)
            return error.reason
        raise AssertionError("the request was served")


async def serve(part: Literal["callers", "floor", "own"], target: str = "redis://127.0.0.1:1") -> None:
    """Serve until stdin ends."""
    if part == "callers":
        callers = Callers(target)
        await control.serve_commands(callers.open, callers.close, callers.counters)
    elif part == "own":
        await control.serve_commands(Own(target).measure)
    else:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Refusing(), server)
        async with control.serving(server) as address:
            await control.serve_commands(address=address)


if __name__ == "__main__":
    control.main(serve, __doc__)
