"""A stock gRPC client inside a station: it dials `xds:///kvmesh` and sends a small request at each tick, ready or not.

`python -m tests.gameday.stock_client PLAN` reads a `Stock` and writes a JSON line for each request. The bootstrap belongs
to the whole process, so that each client is a process. It ends when its stop file exists and all requests have ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import grpc
import msgspec

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

TARGET: Final = "xds:///kvmesh"
EVERY_S: Final = 0.5
DEADLINE_S: Final = 20.0
PROMPT_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 4


class Stock(msgspec.Struct, frozen=True):
    """The file of a client."""

    bootstrap: Mapping[str, Any]
    options: Mapping[str, int]
    """Channel options."""
    key: str
    calls: str
    """File of the requests."""
    stop: str
    """File that ends the load."""


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A request and its answer. Times are of the machine's monotonic clock."""

    sent_s: float
    ended_s: float
    region: str
    """Region of the frontend that answered; empty: none did."""
    error: str
    """Status; empty: all tokens arrived."""


async def play(stock: Stock, file: BinaryIO) -> None:
    """Send requests until the stop file exists."""
    stop, number = Path(stock.stop), 0
    async with (
        grpc.aio.insecure_channel(TARGET, list(stock.options.items())) as channel,
        asyncio.TaskGroup() as group,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        while not stop.exists():
            number += 1
            group.create_task(_ask(stub, stock.key, number, file))
            await asyncio.sleep(EVERY_S)


async def _ask(stub: Any, key: str, number: int, file: BinaryIO) -> None:
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=[number % 1000 + 1] * PROMPT_TOKENS),
        limits=pb.Limits(max_output_tokens=OUTPUT_TOKENS),
        options=pb.GenerateOptions(explain=True),
    )
    sent_s, region, error = time.monotonic(), "", "CUT"
    try:
        call = stub.Generate(request, timeout=DEADLINE_S, metadata=(("authorization", f"Bearer {key}"),))
        async for event in call:
            if event.HasField("finished"):
                region, error = event.finished.explanation.region, ""
    except grpc.aio.AioRpcError as failed:
        error = failed.code().name
    file.write(msgspec.json.encode(Sent(sent_s, time.monotonic(), region, error)) + b"\n")


def main(path: str) -> None:
    """Play the plan of a file."""
    stock = msgspec.json.decode(Path(path).read_bytes(), type=Stock)
    os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = json.dumps(stock.bootstrap)
    with Path(stock.calls).open("wb", buffering=0) as file:
        asyncio.run(play(stock, file))


if __name__ == "__main__":
    main(sys.argv[1])
