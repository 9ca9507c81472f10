"""A client inside a station: asks one frontend once, and prints the tokens or the error.

`python -m tests.gameday.ask HOST:PORT DEADLINE_S` prints {"code": "OK", "ids": [...]}, or another status and no ids.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvmesh import server
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.integration.generation import generate, token_request

PROMPT = tuple(range(20, 90))
OUTPUT_TOKENS = 12


async def main(address: str, deadline_s: float) -> None:
    async with server.channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = token_request(PROMPT, max_output_tokens=OUTPUT_TOKENS)
        answer = await generate(stub, request, timeout_s=deadline_s)
    print(json.dumps({"code": answer.code.name, "ids": answer.ids}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
